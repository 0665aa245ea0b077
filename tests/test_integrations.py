"""Code that was written for Adam: trainers with the real packages (extra `test-integrations`), and torch's own tools.

Models are built from configs and nothing is downloaded. Every resume is compared bit for bit with the run that went on.
"""

from __future__ import annotations

import copy
import importlib.util
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

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"

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


# In bfloat16 a state that a load has cast to the parameters' dtype is another one.
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (mixed(4, 6, seed=2 * k, dtype=torch.float32), mixed(4, 3, seed=2 * k + 1, dtype=torch.float32))
        for k in range(n)
    ]


def loader(n: int) -> DataLoader[Any]:
    """The batches above, one after the other."""
    x, y = (torch.cat(parts) for parts in zip(*batches(n), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0].to(next(model.parameters()).dtype)).float() - batch[1]).square().mean()


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


def language_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
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
    return transformers.LlamaForCausalLM(config).to(dtype)


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


@dtypes
@pytest.mark.parametrize("how", ["class", "instance"])
def test_hf_trainer_resumes_bit_exact(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Contract 23. Accelerate's wrapper round-trips the state before the first step; a checkpoint is read in another process.

    Guard: SELOptimizer._reinstall puts the saved tensors back in their own dtype.
    """
    model = language_model(dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    trainer = hf_trainer(model, tmp_path / "a", how)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is SELAdamW and trainer.state.global_step == 6
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float(optimizer.state[weight]["step"]) == 6 and not torch.equal(
        weight, before["model.layers.0.mlp.up_proj.weight"]
    )

    other = language_model(seed=1, dtype=dtype)
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


def test_gpt2_is_curved_by_name_as_the_page_says() -> None:
    """Its matrices are in Conv1D modules, of which param_groups warns."""
    transformers = need("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    with pytest.warns(UserWarning, match="nothing to curve in GPT2LMHeadModel, whose matrices belong to Conv1D"):
        param_groups(model)
    optimizer = SELAdam(
        model.named_parameters(), curved=lambda name, p: p.ndim >= 2 and ".wte." not in name and ".wpe." not in name
    )
    names = [name for name, _ in optimizer.named_curved()]
    assert names == [
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]


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


@dtypes
def test_accelerate_resumes_bit_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    """save_state in one process, load_state in another. Guard: SELOptimizer._reinstall."""
    model, other = make_model(dtype=dtype), make_model(seed=1, dtype=dtype)
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
    assert len(wrapped.state_dict()["state"]) == len(list(moved.parameters()))
    by_hand(moved, wrapped, batches(4))
    fresh = make_model()
    expected = SELAdam(param_groups(fresh), lr=1e-2)
    by_hand(fresh, expected, batches(4))
    same_run(moved, wrapped.optimizer, fresh, expected)
    assert set(wrapped.optimizer.state) == set(moved.parameters())


# ------------------------------------------------------------------------------------------------------------- Lightning


def lightning_module(model: Any, manual: bool, seen: list[Any]) -> Any:
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
    lightning, callbacks = need("lightning", "lightning.pytorch.callbacks")
    seen: list[Any] = []
    module = lightning_module(model, manual, seen)
    with warnings.catch_warnings():
        # Advice about workers and logging intervals, for real runs.
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("error", message="the loaded raw weights")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            gradient_clip_val=None if manual else 1.0,
            callbacks=[callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader(3), ckpt_path=None if checkpoint is None else str(checkpoint))
    return trainer.optimizers[0], seen


@dtypes
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_fits_and_resumes_bit_exact(manual: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Contract 23: a subclass made on the fly reads our state, all of it but `step` is moved to the device, and a run goes on.

    Guard: SELOptimizer._reinstall; the wrapper asks the optimizer, also after a load.
    """
    model = make_model(dtype=dtype)
    optimizer, seen = fit(model, manual, tmp_path / "a")
    wrapped, raw, weight, beta = seen[-1]
    assert type(wrapped).__name__ == "LightningSELAdamW" and isinstance(wrapped, SELAdamW) and wrapped is not optimizer
    assert beta == optimizer.beta(model[0].weight)
    plain = make_model(dtype=dtype)
    expected = SELAdamW(param_groups(plain), lr=1e-2, anneal_steps=4)
    # In the order of the groups, in which Lightning sums the norm.
    by_hand(plain, expected, 2 * batches(3), clipped=[p for group in expected.param_groups for p in group["params"]])
    same_run(model, optimizer, plain, expected)

    other = make_model(seed=1, dtype=dtype)
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


# ------------------------------------------------------------------------------------------------------------- PEFT LoRA


def adapted_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    peft = need("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    base = language_model()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
        return peft.get_peft_model(base, config).to(dtype)


def train_adapters(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rows = torch.stack([text["input_ids"] for text in texts()])
    for k in steps:
        batch = rows[2 * k : 2 * k + 2]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("init", ["preserve", "mismatched"])
def test_lora_trains_the_adapters_alone(init: str) -> None:
    """The whole model goes to the optimizer, and no bit of the frozen base moves, whatever `init` says.

    Guard: SELOptimizer._shrink leaves frozen weights alone.
    """
    model = adapted_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = SELAdam(param_groups(model), lr=1e-2, init=init)
    train_adapters(model, optimizer, range(3))
    names = {p: name for name, p in model.named_parameters()}
    trained = {names[p] for p in optimizer.state}
    assert trained == {name for name in before if "lora_" in name} and len(trained) == 4
    assert all("raw" in state for state in optimizer.state.values())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name


@dtypes
def test_lora_resumes_bit_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    """The adapters' file and the optimizer's are all that is needed. Guard: SELOptimizer._reinstall."""
    peft = need("peft")
    model = adapted_model(dtype=dtype)
    optimizer = SELAdam(param_groups(model), lr=1e-2, anneal_steps=6)
    train_adapters(model, optimizer, range(3))
    saved = peft.get_peft_model_state_dict(model)
    torch.save({"adapters": saved, "optimizer": optimizer.state_dict()}, tmp_path / "adapters.pt")
    train_adapters(model, optimizer, range(3, 6))

    other = adapted_model(seed=1, dtype=dtype)
    again = SELAdam(param_groups(other), lr=1e-2, anneal_steps=6)
    file = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert all("lora_" in name for name in file["adapters"])
    peft.set_peft_model_state_dict(other, file["adapters"])
    again.load_state_dict(file["optimizer"])
    train_adapters(other, again, range(3, 6))
    same(dict(model.state_dict()), dict(other.state_dict()))
    same(optimizer.state_dict(), again.state_dict())


# ------------------------------------------------------------------------------------------------------------------- mup


def mup_model(width: int) -> nn.Module:
    mup = need("mup")

    def network(w: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), mup.MuReadout(w, 3))

    torch.manual_seed(0)
    model = network(width)
    mup.set_base_shapes(model, network(8), delta=network(16))
    return model


def unnamed_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """mup reads `infshape` from each parameter, so it takes them without names."""
    return [{**group, "params": [p for _, p in group["params"]]} for group in param_groups(model, **options)]


def test_mup_takes_us_for_adam() -> None:
    """Contract 22: an empty group, and lr and decay scaled in a group. It trains, saves and loads.

    Guard: lr and weight_decay are read from the group, and `step` lists a group only with a parameter that has a gradient.
    """
    mup = need("mup")
    model = mup_model(32)

    def make(model: Any) -> SELAdamW:
        hidden = model[2].weight
        rest = [p for p in model.parameters() if p is not hidden]
        return mup.MuAdam([{"params": [hidden]}, {"params": rest}], impl=SELAdamW, lr=1e-2, weight_decay=0.1)

    optimizer = make(model)
    assert type(optimizer) is SELAdamW
    hidden, empty, _ = optimizer.param_groups
    assert not empty["params"]
    assert hidden["lr"] == 1e-2 / 4 and hidden["weight_decay"] == 0.1 * 4
    assert optimizer.describe().count("mismatched") == 3
    by_hand(model, optimizer, batches(3))

    other = mup_model(32)
    again = make(other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    same_run(model, optimizer, other, again)


def first_moves(width: int, keep_scales: bool, **options: Any) -> dict[str, float]:
    """How far the first step moves raw and each learnable thing beside it, in the hidden matrix."""
    mup = need("mup")
    model = mup_model(width)
    weight: Any = model[2].weight  # type: ignore[index]
    optimizer = mup.MuAdam(unnamed_groups(model), impl=SELAdam, lr=1e-3, eps=1e-30, beta=4.0, **options)
    if keep_scales:
        for group in optimizer.param_groups:
            times = 1e-3 / group["lr"]
            group["scale_lr"] = {"e": 8 * times, "l": 4 * times, "m": 0.5 * times}
    optimizer.state_dict()
    what = {"raw": lambda: optimizer.raw(weight)}
    what |= {kind: lambda kind=kind: optimizer.scales(weight)[kind][1] for kind in "elm"}
    what |= {
        key: lambda key=key: optimizer.state[weight][key] for key in ("residual_b",) if options.get("residual_rank")
    }
    before = {name: read().clone() for name, read in what.items()}
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    return {name: float((read() - before[name]).abs().max()) for name, read in what.items()}


def test_every_secondary_rate_is_a_multiple_of_the_groups_lr() -> None:
    """Contract 22: mup scales lr, and so everything that a step moves: raw, scales and the residual.

    Guard: the update takes the scales' rates times the group's lr, not the constructor's.
    """
    options = {"scale_lr": {"e": 8.0, "l": 4.0, "m": 0.5}, "structure": "col", "residual_rank": 1, "lr_space": "raw"}
    narrow, wide = (first_moves(width, False, **options) for width in (8, 32))
    assert narrow == pytest.approx({"raw": 1e-3, "e": 8e-3, "l": 4e-3, "m": 0.5e-3, "residual_b": 1e-3}, rel=1e-3)
    assert {name: move / narrow[name] for name, move in wide.items()} == pytest.approx(
        dict.fromkeys(narrow, 0.25), rel=1e-3
    )


def test_scales_keep_their_pace_at_every_width_where_scale_lr_makes_up_for_mup() -> None:
    """A scale is a gain of size 1 at every width, and mup gives gains an lr that does not shrink."""
    narrow, wide = (first_moves(width, True, structure="col", lr_space="raw") for width in (8, 32))
    assert wide["raw"] == pytest.approx(narrow["raw"] / 4, rel=1e-3)
    for kind in "elm":
        assert wide[kind] == pytest.approx(narrow[kind], rel=1e-3)


def test_with_mup_the_best_lr_stays_nearer_when_the_network_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark in a short form: four times as wide, and the best lr without mup falls by more than it moves with mup."""
    need("mup", "sklearn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("width", BENCHMARKS / "width.py")
    assert spec is not None and spec.loader is not None
    width = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(width)
    rates = [2.0**k for k in range(-10, -4)]
    cases = [
        {"arm": arm, "base": 64, "width": w, "rates": rates, "steps": 30, "seeds": 1}
        for arm in ("without mup", "mup")
        for w in (64, 256)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"lr \* beta")  # at the upper end of the grid
        measured = [width.measure(case) for case in cases]
    assert measured[0]["losses"] == measured[2]["losses"], "at the base width mup changes nothing"
    without, with_mup = (width.shift({"cases": measured}, arm) for arm in ("without mup", "mup"))
    assert without < -0.4 and abs(with_mup) < 0.75 * abs(without)


# ------------------------------------------------------------------------------------------------------------ torch's own


def test_grad_scaler_with_accumulation_and_clipping_is_the_loop() -> None:
    """Contract 18: scaled, accumulated, unscaled, clipped, and a step that overflows leaves no trace.

    Guard: SELAdam._step_supports_amp_scaling is False where no kernel unscales, and GradScaler skips the step.
    """
    model, plain = make_model(), make_model()
    optimizer, expected = (SELAdam(param_groups(m), lr=1e-2, anneal_steps=4) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
    schedule = warm_up(optimizer)
    skipped = 0
    for k, batch in enumerate([*batches(4), *batches(2), *batches(8)[4:]]):
        bad = k == 5  # the second half of the third step
        scaler.scale(loss_of(model, batch) / 2 * (torch.inf if bad else 1.0)).backward()
        if k % 2 == 0:
            continue
        before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if bad:
            skipped += 1
            assert scaler.get_scale() < scale
            same(before, (dict(model.state_dict()), optimizer.state_dict()))
        else:
            schedule.step()
        optimizer.zero_grad()
    assert skipped == 1
    by_hand(plain, expected, batches(8), accumulate=2)
    same_run(model, optimizer, plain, expected)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warm-up from 0": lambda o: lr_scheduler.LambdaLR(o, lambda k: min(k / 4, 1)),
    "sequential": warm_up,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=10),
    "cyclic betas": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
}


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> list[tuple[Any, ...]]:
    seen = []
    for k in steps:
        optimizer.zero_grad()
        loss_of(model, batches(k + 1)[k]).backward()
        optimizer.step()
        seen.append((float(optimizer.param_groups[0]["lr"]), tuple(map(float, optimizer.param_groups[0]["betas"]))))
        schedule.step()
    return seen


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_drive_us_as_they_drive_adam(name: str, tensor_lr: bool) -> None:
    """Contract 16, 19: where weight = raw, every schedule gives Adam's weights bit for bit; a tensor lr stays the tensor it was.

    Guard: lr and betas are read from the group at each step.
    """
    ours, theirs = make_model(), make_model()
    lr: Any = (lambda: torch.tensor(1e-2)) if tensor_lr else (lambda: 1e-2)
    flat: dict[str, Any] = {
        "curved": "all",
        "combine": "congruent",
        "structure": "none",
        "scale_init": {"e": 0.0, "l": "beta"},
    }
    optimizer = SELAdam(ours.parameters(), lr=lr(), beta=12.5, foreach=False, **flat)
    adam = torch.optim.Adam(theirs.parameters(), lr=lr(), foreach=False, fused=False)
    schedule, its_schedule = SCHEDULES[name](optimizer), SCHEDULES[name](adam)
    held = optimizer.param_groups[0]["lr"]
    seen = scheduled(ours, optimizer, schedule, range(8))
    assert seen == scheduled(theirs, adam, its_schedule, range(8)) and len(set(seen)) >= 3
    assert next(optimizer.named_curved()) and len(list(optimizer.named_curved())) == 6
    if tensor_lr:
        assert optimizer.param_groups[0]["lr"] is held
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    else:
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_resume_bit_exact(name: str) -> None:
    """A scheduler writes into the group when it is made; the state loaded after it wins. Guard: _merged keeps saved options."""
    model, other = make_model(), make_model(seed=1)
    optimizer, again = (SELAdam(param_groups(m), lr=1e-2, anneal_steps=6) for m in (model, other))
    schedule, its_schedule = SCHEDULES[name](optimizer), SCHEDULES[name](again)
    scheduled(model, optimizer, schedule, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    for target, state in zip((other, again, its_schedule), saved, strict=True):
        target.load_state_dict(state)
    expected = scheduled(model, optimizer, schedule, range(4, 8))
    assert scheduled(other, again, its_schedule, range(4, 8)) == expected
    same_run(model, optimizer, other, again)


def test_a_compiled_model_trains_as_it_does_uncompiled() -> None:
    """Weights are written in place under a compiled model: it sees them and is not compiled again; its state loads elsewhere."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    model, plain = make_model(), make_model()
    compiled: Any = torch.compile(model, backend=count)
    optimizer, expected = (SELAdam(param_groups(m), lr=1e-2, anneal_steps=6) for m in (compiled, plain))
    assert next(optimizer.named_curved())[0].startswith("_orig_mod.")
    by_hand(compiled, optimizer, batches(6))
    by_hand(plain, expected, batches(6))
    assert count.frame_count == 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    resumed = make_model()
    resumed.load_state_dict(model.state_dict())
    again = SELAdam(param_groups(resumed), lr=1e-2, anneal_steps=6)
    again.load_state_dict(optimizer.state_dict())
    same(again.state_dict()["state"], optimizer.state_dict()["state"])
