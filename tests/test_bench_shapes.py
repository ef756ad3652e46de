import pytest
import torch

from moe_inductor.bench import floor, peers, routing, shapes
from moe_inductor.bench.errors import BenchError
from moe_inductor.spec import Halves, Layout

#: kernels.md, section 1: F_fwd and F_bwd in TFLOP, saved h in MB, floors in ms at 790 TFLOP/s and 4.3 TB/s, T = 16384.
LIMITS = {
    "qwen3-30b": (1.24, 2.47, 403, 1.71, 3.27),
    "qwen3-235b": (4.95, 9.90, 805, 6.54, 12.81),
    "olmoe": (1.65, 3.30, 537, 2.23, 4.32),
    "mixtral-8x7b": (11.5, 23.1, 1879, 14.7, 29.3),
    "deepseek-v3": (11.5, 23.1, 1074, 15.1, 29.7),
    "gpt-oss-20b": (3.26, 6.52, 755, 4.24, 8.37),
}


def _digits(value: float, like: float) -> float:
    """``value`` with as many decimals as ``like`` is written with."""
    return round(value, len(str(like).partition(".")[2]) if isinstance(like, float) else 0)


@pytest.mark.parametrize("name", LIMITS)
def test_floors_are_those_of_the_published_table(name):
    shape, want = shapes.named(name), LIMITS[name]
    work = {
        phase: sum(k.flops for k in floor.kernels(shape, 16384) if k.phase == phase)
        for phase in ("forward", "backward")
    }
    times = floor.floor(shape, 16384, 790e12, 4.3e12)
    got = (
        work["forward"] / 1e12,
        work["backward"] / 1e12,
        floor.saved(shape, 16384) / 1e6,
        times["forward"],
        times["backward"],
    )
    assert [abs(_digits(g, w) - w) for g, w in zip(got, want, strict=True)] == pytest.approx([0] * 5, abs=0.0101)
    assert times["forward_backward"] == pytest.approx(times["forward"] + times["backward"])


def test_decode_floor_is_the_weights_of_the_chosen_experts():
    assert 1e3 * floor.weight_read(shapes.named("qwen3-30b"), 8, 4.3e12) == pytest.approx(18, abs=0.5)  # kernels.md


def test_a_kernel_without_enough_work_is_bound_by_memory():
    few = {k.name: k for k in floor.kernels(shapes.named("qwen3-30b"), 1)}
    assert few["up"].ms(790e12, 4.3e12) == pytest.approx(1e3 * few["up"].moved / 4.3e12)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("Qwen3MoeConfig", shapes.Shape("made", 2048, 768, 128, 8)),
        ("MixtralConfig", shapes.Shape("made", 4096, 14336, 8, 2)),
        ("DeepseekV3Config", shapes.Shape("made", 7168, 2048, 256, 8)),
        (
            "GptOssConfig",
            shapes.Shape("made", 2880, 2880, 32, 4, "clamped_swiglu", Halves.INTERLEAVED, Layout.IN_OUT, bias=True),
        ),
    ],
)
def test_shape_of_a_transformers_config(kind, want, tmp_path):
    import transformers

    sizes = {
        "hidden_size": want.hidden,
        "num_experts_per_tok": want.top_k,
        "moe_intermediate_size": want.inter,
        "intermediate_size": 18432 if kind == "DeepseekV3Config" else want.inter,
        "num_experts": want.experts,
        "num_local_experts": want.experts,
        "n_routed_experts": want.experts,
    }
    known = set(getattr(transformers, kind)().to_dict())
    config = getattr(transformers, kind)(**{key: value for key, value in sizes.items() if key in known})
    folder = tmp_path / "made"
    config.save_pretrained(folder)
    assert shapes.from_path(folder) == want
    assert shapes.from_config({"text_config": config.to_dict()}, "made") == want


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "hidden_size": 64, "intermediate_size": 64}, "names no experts"),
        ({"hidden_size": 8, "intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 4}, "4 of 2 experts"),
        (
            {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "hidden_act": "tanh",
            },
            "'tanh'",
        ),
    ],
)
def test_config_that_is_no_layer_is_refused(config, words):
    with pytest.raises(BenchError, match=words):
        shapes.from_config(config)


def test_unknown_names_say_the_nearest():
    with pytest.raises(BenchError, match="did you mean mixtral-8x7b"):
        shapes.named("mixtral")
    with pytest.raises(BenchError, match="known: uniform, zipf, empty"):
        routing.route("even", 4, 4, 2, torch.Generator())
    with pytest.raises(BenchError, match="no peer is called 'tutel'"):
        peers.arms(shapes.named("tiny"), peers.Choice(("tutel",)))


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_every_row_has_distinct_experts_in_range(name):
    idx = routing.route(name, 512, 32, 4, torch.Generator().manual_seed(3))
    assert idx.shape == (512, 4) and idx.dtype == torch.int64
    assert int(idx.min()) >= 0 and int(idx.max()) < 32
    assert bool((idx.sort(1).values.diff(dim=1) > 0).all())


def test_routings_load_experts_as_they_say():
    load = {
        name: routing.loads(routing.route(name, 4096, 32, 2, torch.Generator().manual_seed(5)), 32)
        for name in routing.ROUTINGS
    }
    mean = 4096 * 2 / 32
    assert load["uniform"]["largest"] < 1.3 * mean  # 6 standard deviations of a binomial
    assert load["uniform"]["without_rows"] == load["zipf"]["without_rows"] == 0
    assert load["zipf"]["largest"] > 5 * mean  # the first of 32 has weight 1/H(32) = 0.25 in each of two draws
    assert load["empty"]["without_rows"] == 1
    with pytest.raises(BenchError, match="leaves one of 2 experts out"):
        routing.route("empty", 4, 2, 2, torch.Generator())
