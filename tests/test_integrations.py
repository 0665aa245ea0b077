"""Code that was written for Adam: trainers with the real packages (extra `test-integrations`), and torch's own tools.

Models are built from configs and nothing is downloaded. Every resume is compared bit for bit with the run that went on.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from seloptim import Curved, SELAdam, SELAdamW, _rule, param_groups
from tests.cases import mixed

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def need(*names: str) -> Any:
    """The packages, or a skip (a failure under --fail-on-skip). What they warn of at import is their own matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [pytest.importorskip(name) for name in names]
    return found[0] if len(found) == 1 else found


def same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, dtypes and keys included."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}.{k}")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def same_run(model: nn.Module, optimizer: Any, other: nn.Module, its_optimizer: Any) -> None:
    """Weights and everything the optimizers hold; and the runs were runs of ours, with the invariant of a curved weight."""
    curved = [p for _, p in optimizer.named_curved()]
    assert curved and all(float(optimizer.state[p]["step"]) > 0 for p in curved)
    for p in curved:
        group = optimizer._find(p)[0]
        mapped = _rule.push(optimizer._views(p, group), optimizer._curve(p, group)).view(p.shape)
        assert torch.equal(p.detach(), mapped.to(p.dtype))
    same(dict(model.state_dict()), dict(other.state_dict()))
    same(optimizer.state_dict(), its_optimizer.state_dict())


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    return [(mixed(4, 6, seed=2 * k, dtype=torch.float32), mixed(4, 3, seed=2 * k + 1, dtype=torch.float32)) for k in range(n)]


def loader(n: int) -> DataLoader[Any]:
    """The batches above, one after the other."""
    x, y = (torch.cat(parts) for parts in zip(*batches(n), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Two steps of warm-up from 0, then a cosine."""
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LambdaLR(optimizer, lambda k: k / 2), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[2],
    )


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    accumulate: int = 1,
    clipped: list[Tensor] | None = None,
) -> None:
    """What the trainers do, in a loop: scheduled, accumulated, clipped."""
    schedule = warm_up(optimizer)
    for k, batch in enumerate(data):
        (loss_of(model, batch) / accumulate).backward()
        if (k + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(clipped or model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


# --------------------------------------------------------------------------------------------- Hugging Face Transformers


def language_model(seed: int = 0) -> Any:
    transformers = need("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(32, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def hf_trainer(model: Any, folder: Path, how: str, **arguments: Any) -> Any:
    transformers = need("transformers", "accelerate")[0]
    settings = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
    }
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **{**settings, **arguments}
    )
    if how == "class":
        given: dict[str, Any] = {"optimizer_cls_and_kwargs": (SELAdamW, {"lr": args.learning_rate, "anneal_steps": 6})}
    else:
        given = {"optimizers": (SELAdamW(param_groups(model), lr=args.learning_rate, anneal_steps=6), None)}
    return transformers.Trainer(model, args, train_dataset=texts(), **given)


@pytest.mark.parametrize("how", ["class", "instance"])
def test_hf_trainer_resumes_bit_exact(how: str, tmp_path: Path) -> None:
    """Contract 23. Accelerate's wrapper round-trips the state before the first step; a checkpoint is read in another process.

    Guard: SELOptimizer.__setstate__ re-installs the saved tensors.
    """
    model = language_model()
    before = copy.deepcopy(model.state_dict())
    trainer = hf_trainer(model, tmp_path / "a", how)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is SELAdamW and trainer.state.global_step == 6
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float(optimizer.state[weight]["step"]) == 6 and not torch.equal(
        weight, before["model.layers.0.mlp.up_proj.weight"]
    )

    other = language_model(seed=1)
    again = hf_trainer(other, tmp_path / "b", how)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    same_run(model, optimizer, other, again.optimizer.optimizer)


def test_hf_trainer_takes_the_groups_of_param_groups(tmp_path: Path) -> None:
    """`params` among the keyword arguments stand in for the Trainer's own groups, which know decay and no module types."""
    model = language_model()
    transformers = need("transformers")
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, save_strategy="no"
    )
    kwargs = {"params": param_groups(model), "lr": 1e-2}
    trainer = transformers.Trainer(model, args, train_dataset=texts(), optimizer_cls_and_kwargs=(SELAdamW, kwargs))
    trainer.train()
    names = [name for name, _ in trainer.optimizer.optimizer.named_curved()]
    assert "lm_head.weight" in names and "model.embed_tokens.weight" not in names


# ------------------------------------------------------------------------------------------------------------ Accelerate


def accelerated(folder: Path, model: nn.Module, n: int, *, save_at: int = -1, load: bool = False) -> Any:
    """As many batches of `n` as are left, accumulated by two and clipped, through Accelerate; the wrapped optimizer."""
    accelerate = need("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = SELAdamW(param_groups(model), lr=1e-2, anneal_steps=4)
    model, wrapped, data, schedule = accelerator.prepare(model, optimizer, loader(n), warm_up(optimizer))
    done = 0
    if load:
        accelerator.load_state(str(folder))
        done = n // 2
        data = accelerator.skip_first_batches(data, done)
    for k, batch in enumerate(data, done):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
        if k + 1 == save_at:
            accelerator.save_state(str(folder))
    assert wrapped.optimizer is optimizer
    return optimizer


def test_accelerate_changes_nothing(tmp_path: Path) -> None:
    """Contract 23: prepare() round-trips the state. The run is the loop's, bit for bit.

    Guard: SELOptimizer.load_state_dict takes its own state back.
    """
    model, plain = make_model(), make_model()
    optimizer = accelerated(tmp_path, model, 12)
    expected = SELAdamW(param_groups(plain), lr=1e-2, anneal_steps=4)
    by_hand(plain, expected, batches(12), accumulate=2)
    same_run(model, optimizer, plain, expected)


def test_accelerate_resumes_bit_exact(tmp_path: Path) -> None:
    """save_state in one process, load_state in another. Guard: SELOptimizer.__setstate__."""
    model, other = make_model(), make_model(seed=1)
    optimizer = accelerated(tmp_path, model, 12, save_at=6)
    again = accelerated(tmp_path, other, 12, load=True)
    same_run(model, optimizer, other, again)


def test_accelerate_may_replace_parameters_before_the_first_step() -> None:
    """Contract 23: where a model is moved or sharded, prepare() first makes state and then exchanges the parameters.

    Guard: SELOptimizer._forget_replaced, without which state_dict() ends in a KeyError and the old weights stay in memory.
    """
    accelerate = need("accelerate")
    model = make_model()
    wrapped = accelerate.Accelerator(cpu=True).prepare(SELAdam(param_groups(model), lr=1e-2))
    assert wrapped.optimizer.state, "prepare() made state"
    moved = copy.deepcopy(model)
    wrapped._switch_parameters(dict(zip(model.parameters(), moved.parameters(), strict=True)))
    by_hand(moved, wrapped, batches(4))
    fresh = make_model()
    expected = SELAdam(param_groups(fresh), lr=1e-2)
    by_hand(fresh, expected, batches(4))
    same_run(moved, wrapped.optimizer, fresh, expected)
    assert set(wrapped.optimizer.state) == set(moved.parameters())


# ------------------------------------------------------------------------------------------------------------- Lightning


def lightning_module(model: nn.Module, manual: bool, seen: list[Any]) -> Any:
    lightning = need("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Any:
            loss = loss_of(self.model, batch)
            wrapped: Any = self.optimizers()
            if manual:
                self.manual_backward(loss)
                self.clip_gradients(wrapped, 1.0, "norm")
                wrapped.step()
                schedule: Any = self.lr_schedulers()
                schedule.step()
                wrapped.zero_grad()
            weight = self.model[0].weight
            seen.append((wrapped, wrapped.raw(weight).clone(), weight.detach().clone(), wrapped.beta(weight)))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = SELAdamW(param_groups(self.model), lr=1e-2, anneal_steps=4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up(optimizer), "interval": "step"}}

    return Module()


def fit(model: nn.Module, manual: bool, folder: Path, checkpoint: Path | None = None) -> tuple[Any, list[Any]]:
    """Two epochs of three batches, with a checkpoint after each; the optimizer, and what each training_step has seen of it."""
    lightning = need("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[Any] = []
    module = lightning_module(model, manual, seen)
    with warnings.catch_warnings():
        # Advice about workers and logging intervals, for real runs.
        warnings.filterwarnings("ignore", module="lightning")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            gradient_clip_val=None if manual else 1.0,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader(3), ckpt_path=None if checkpoint is None else str(checkpoint))
    return trainer.optimizers[0], seen


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_fits_and_resumes_bit_exact(manual: bool, tmp_path: Path) -> None:
    """Contract 23: a subclass made on the fly reads our state, all of it but `step` is moved to the device, and a run goes on.

    Guard: SELOptimizer.__setstate__; the wrapper asks the optimizer, also after a load.
    """
    model = make_model()
    optimizer, seen = fit(model, manual, tmp_path / "a")
    wrapped, raw, weight, beta = seen[-1]
    assert type(wrapped).__name__ == "LightningSELAdamW" and isinstance(wrapped, SELAdamW) and wrapped is not optimizer
    assert beta == optimizer.beta(model[0].weight)
    plain = make_model()
    expected = SELAdamW(param_groups(plain), lr=1e-2, anneal_steps=4)
    # In the order of the groups, in which Lightning sums the norm.
    by_hand(plain, expected, 2 * batches(3), clipped=[p for group in expected.param_groups for p in group["params"]])
    same_run(model, optimizer, plain, expected)

    other = make_model(seed=1)
    again, seen_again = fit(other, manual, tmp_path / "b", tmp_path / "a" / "epoch=0.ckpt")
    same_run(model, optimizer, other, again)
    assert len(seen) == 6 and len(seen_again) == 3
    # What a hook reads through the wrapper is the loaded state.
    assert torch.equal(seen_again[-1][1], raw) and torch.equal(seen_again[-1][2], weight)


@pytest.mark.parametrize("make", [SELAdamW, lambda params, lr: Curved(torch.optim.SGD, params, lr=lr, scale_lr={})])
def test_a_copy_of_the_dict_sees_what_is_loaded(make: Callable[..., Any]) -> None:
    """Contract 23: wrappers take a copy of __dict__ at construction and never again. Guard: __setstate__ loads in place."""
    model, other = make_model(), make_model()
    optimizer, saved = make(model.parameters(), lr=1e-2), make(other.parameters(), lr=2e-2)
    by_hand(model, optimizer, batches(2))
    by_hand(other, saved, batches(3))
    wrapper = object.__new__(type("Wrapper", (type(optimizer),), {}))
    wrapper.__dict__ = dict(optimizer.__dict__)
    with pytest.warns(UserWarning, match="raw weights are authoritative"):
        optimizer.load_state_dict(saved.state_dict())
    assert wrapper.param_groups[0] is optimizer.param_groups[0]
    assert torch.equal(wrapper.raw(model[0].weight), saved.raw(other[0].weight))
    assert wrapper.raw(model[0].weight) is optimizer.raw(model[0].weight)
