"""A real ``Trainer`` on CPU. The backend's name stands for our pass before AOTAutograd, which builds in seconds."""

import copy
import pickle

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.utils import DynamoBackend, TorchDynamoPlugin  # noqa: E402

from moe_inductor.integrations import hf  # noqa: E402
from moe_inductor.report import report, reset  # noqa: E402

STEPS = 3


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No shim, no variable and no accelerator state left from another test."""
    for variable in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(variable, "")  # TrainingArguments sets it: this makes monkeypatch take it away afterwards
        monkeypatch.delenv(variable)
    reset()
    yield
    hf.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def by_name(monkeypatch):
    """``"megamoe"`` in torch's registry, stopping at AOTAutograd."""
    from torch._dynamo.backends import registry
    from torch._dynamo.backends.debugging import aot_eager

    from moe_inductor.backend import with_inner

    registry.list_backends()
    monkeypatch.setitem(registry._BACKENDS, "megamoe", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "megamoe", with_inner(aot_eager))


def model():
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=32,
            moe_intermediate_size=16,
            intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_hidden_layers=2,
            vocab_size=64,
            use_cache=False,
        )
    )


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, i):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def losses(model, folder, **arguments):
    """Loss of each step of a short training run."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        **arguments,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_flag_of_training_arguments(by_name, tmp_path):
    eager = losses(model(), tmp_path)
    hf.enable()
    compiled = losses(model(), tmp_path, torch_compile=True, torch_compile_backend="megamoe")
    report().require(2)
    assert len(eager) == STEPS
    # AdamW's first steps are lr * g / |g|, so rounding of g (1e-7) moves a loss far less than 1e-4
    assert compiled == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_model_compiled_beforehand_needs_no_shim(by_name, tmp_path, how):
    compiled, arguments = model(), {}
    if how == "in place":
        compiled.compile(backend="megamoe")
    else:
        compiled = torch.compile(compiled, backend="megamoe")
        arguments["remove_unused_columns"] = False  # the wrapper's signature names no column, with any backend
    eager = losses(model(), tmp_path)
    assert losses(compiled, tmp_path, **arguments) == pytest.approx(eager, rel=1e-4)
    report().require(2)
    assert not hf.is_enabled()


def test_without_the_shim_accelerate_refuses_the_name():
    with pytest.raises(ValueError, match="MEGAMOE"):
        TorchDynamoPlugin(backend="megamoe")


def test_enable_and_disable():
    before = list(DynamoBackend)
    hf.enable()
    hf.enable()
    assert hf.is_enabled() and list(DynamoBackend) == before and DynamoBackend.list() == [b.value for b in before]
    ours = DynamoBackend("MEGAMOE")
    assert ours is DynamoBackend("MEGAMOE") is copy.deepcopy(ours) is pickle.loads(pickle.dumps(ours))
    assert isinstance(ours, DynamoBackend) and "MEGAMOE" in DynamoBackend
    assert ours != DynamoBackend.NO and str(ours) == ours.value == ours.name == "MEGAMOE"
    assert TorchDynamoPlugin(backend="megamoe").to_kwargs()["backend"] == "megamoe"
    with pytest.raises(ValueError, match="MEGAMOES"):
        DynamoBackend("MEGAMOES")
    hf.disable()
    hf.disable()
    assert not hf.is_enabled()
    with pytest.raises(ValueError, match="MEGAMOE"):
        DynamoBackend("MEGAMOE")


def test_the_name_travels_by_the_environment_too(monkeypatch):
    hf.enable()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "megamoe")
    assert TorchDynamoPlugin().to_kwargs()["backend"] == "megamoe"


def test_an_earlier_hook_is_asked_and_restored(monkeypatch):
    def earlier(cls, value):
        return cls.EAGER if value == "OTHER" else None

    DynamoBackend._missing_ = classmethod(earlier)
    try:
        hf.enable()
        assert DynamoBackend("OTHER") is DynamoBackend.EAGER and DynamoBackend("MEGAMOE").value == "MEGAMOE"
        hf.disable()
        assert DynamoBackend("OTHER") is DynamoBackend.EAGER
    finally:
        del DynamoBackend._missing_
