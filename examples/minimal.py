"""The smallest change to an existing script: Adam out, SELAdam in.

  import torch
+ from seloptim import SELAdam, param_groups
...
- optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
+ optimizer = SELAdam(param_groups(model), lr=1e-2)
"""

import torch
from torch import nn

from seloptim import SELAdam, param_groups

torch.manual_seed(0)
x = torch.rand(256, 2) * 8 - 4
y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:])

model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = SELAdam(param_groups(model), lr=1e-2)

for step in range(201):
    loss = nn.functional.mse_loss(model(x), y)
    if step % 100 == 0:
        print(f"step {step:3}  loss {loss.item():.5f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# What is new: behind each weight stand a raw weight and scales, to be read at any time.
weight = model[2].weight
print(f"a weight {weight[0, 0].item():+.5f}, its raw weight {optimizer.raw(weight)[0, 0].item():+.5f}")
for kind, (row, column) in optimizer.scales(weight).items():
    print(f"scale {kind}: {(row * column).mean().item():.4f} on average")
