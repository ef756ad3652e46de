import re

import pytest

from moe_inductor.options import (
    KEYS,
    Kernel,
    OptionError,
    Options,
    Precision,
    Require,
    Verify,
    WeightCache,
    resolve,
)


def ours(options=None, mode=None, **environ):
    return resolve(options, mode, environ)[0]


def inductors(options=None, mode=None):
    return resolve(options, mode, {})[1]


def test_nothing_given_means_the_defaults_and_no_inductor_option():
    assert resolve(None, None, {}) == (Options(), {})
    assert resolve({}, None, {}) == (Options(), {})


def test_every_key_is_read():
    options = ours(
        {
            "moe.precision": "fp8",
            "moe.precision_rules": [("*.layers.0.*", "bf16"), ["*", "auto"]],
            "moe.require": "all",
            "moe.verify": "off",
            "moe.recompute": "all",
            "moe.mode": "max-autotune",
            "moe.weight_cache": "step",
            "moe.kernel": "reference",
            "moe.ep_max_tokens": 4096,
            "moe.ep_capacity": 2,
            "moe.strict": True,
        }
    )
    assert options.precision is Precision.FP8
    assert options.precision_rules == (("*.layers.0.*", Precision.BF16), ("*", Precision.AUTO))
    assert (options.require, options.verify, options.weight_cache) == (Require.ALL, Verify.OFF, WeightCache.STEP)
    assert (options.kernel, options.ep_max_tokens, options.ep_capacity) == (Kernel.REFERENCE, 4096, 2.0)
    assert options.strict and options.mode == "max-autotune" and not options.disabled
    assert hash(options) == hash(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe.precison": "bf16"}, "did you mean 'moe.precision'?"),
        ({"moe.weights_cache": "off"}, "did you mean 'moe.weight_cache'?"),
        ({"moe.zzzzzz": 1}, "known: moe.ep_capacity, "),
        ({"moe.disabled": True}, "unknown option 'moe.disabled'"),
        ({"moe.precision": "fp18"}, "moe.precision cannot be 'fp18'; did you mean 'fp8'?"),
        ({"moe.precision": 8}, "moe.precision takes one of auto, bf16, fp8, mxfp8, fp8_bwd, not 8 (int)"),
        ({"moe.require": "al"}, "did you mean 'all'?"),
        ({"moe.verify": True}, "moe.verify takes one of off, first, all, not True (bool)"),
        ({"moe.kernel": "libary"}, "did you mean 'library'?"),
        ({"moe.strict": 1}, "moe.strict takes True or False, not 1 (int)"),
        ({"moe.ep_max_tokens": True}, "moe.ep_max_tokens takes a number of tokens (int), not True (bool)"),
        ({"moe.ep_max_tokens": 1.5}, "not 1.5 (float)"),
        ({"moe.ep_max_tokens": 0}, "must be at least 1, not 0"),
        ({"moe.ep_capacity": "2"}, "moe.ep_capacity takes a factor (float), not '2' (str)"),
        ({"moe.ep_capacity": 0.5}, "at least 1, not 0.5"),
        ({"moe.ep_capacity": float("nan")}, "finite"),
        ({"moe.mode": "max-autotun"}, "did you mean 'max-autotune'?"),
        ({"moe.mode": 3}, "not 3 (int)"),
        ({"moe.precision_rules": "x"}, "takes a list of (glob, precision) pairs, not 'x' (str)"),
        ({"moe.precision_rules": [("a", "bf16"), "b"]}, "moe.precision_rules[1] must be a (glob, precision) pair"),
        ({"moe.precision_rules": [("a", "b16")]}, "moe.precision_rules[0] cannot be 'b16'; did you mean 'bf16'?"),
        ({1: 2}, "options has the key 1 (int); keys are strings"),
        ("moe.strict", "options takes a dictionary, not 'moe.strict' (str)"),
    ],
)
def test_wrong_input_names_what_to_write(options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        ours(options)
    assert caught.type is OptionError


@pytest.mark.parametrize("key", ["precision", "moe_precision", "moe-precision", "megamoe.precision", "MOE.precision"])
def test_a_key_that_only_resembles_ours_is_refused_with_ours(key):
    with pytest.raises(OptionError, match=re.escape("did you mean 'moe.precision'?")):
        ours({key: "bf16"})


def test_keys_of_inductor_pass_through_and_unknown_ones_are_left_to_it():
    given = {"max_autotune": True, "triton.cudagraphs": False, "epilogue-fusion": True, "no_such_thing_at_all": 1}
    assert inductors({**given, "moe.strict": True}) == given


@pytest.mark.parametrize("given", [(None, "reduce-overhead"), ({"moe.mode": "reduce-overhead"}, None)])
def test_a_mode_is_written_out(given):
    assert inductors(*given) == {"triton.cudagraphs": True}


def test_a_mode_joins_other_options_and_agreeing_ones():
    assert inductors({"moe.mode": "reduce-overhead", "max_autotune": True, "triton.cudagraphs": True}) == {
        "triton.cudagraphs": True,
        "max_autotune": True,
    }


def test_a_mode_against_an_explicit_key_names_both():
    words = "moe.mode='max-autotune' disagrees with the options max-autotune=False (the mode sets True)"
    with pytest.raises(OptionError, match=re.escape(words)):
        ours({"moe.mode": "max-autotune", "max-autotune": False})


def test_two_modes_that_differ_are_refused():
    with pytest.raises(OptionError, match="disagree"):
        ours({"moe.mode": "max-autotune"}, mode="reduce-overhead")
    assert inductors({"moe.mode": "default"}, mode="default") == {}


def test_the_environment_is_below_options_and_above_defaults():
    environ = {"MEGAMOE_PRECISION": "bf16", "MEGAMOE_REQUIRE": "all", "MEGAMOE_DISABLE": "1"}
    assert ours(None, **environ) == Options(precision=Precision.BF16, require=Require.ALL, disabled=True)
    assert ours({"moe.precision": "auto", "moe.require": "none"}, **environ) == Options(disabled=True)
    assert ours(None, MEGAMOE_PRECISION="", MEGAMOE_DISABLE="0") == Options()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MEGAMOE_PRECISION", "bf61", "MEGAMOE_PRECISION cannot be 'bf61'; did you mean 'bf16'?"),
        ("MEGAMOE_DISABLE", "maybe", "MEGAMOE_DISABLE cannot be 'maybe'; known: 1, true"),
    ],
)
def test_a_wrong_variable_is_named(variable, value, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        ours(None, **{variable: value})


def test_the_first_precision_rule_that_fits_a_parameter_or_a_module_above_it_decides():
    options = ours({"moe.precision": "auto", "moe.precision_rules": [("model.layers.0", "bf16"), ("*.experts", "fp8")]})
    for layer, precision in ((0, Precision.BF16), (1, Precision.FP8)):
        names = [f"model.layers.{layer}.mlp.experts.{w}" for w in ("gate_up_proj", "down_proj")]
        assert options.precision_for(names) is precision
    assert options.precision_for(["model.layers.1.mlp.shared.weight"]) is Precision.AUTO
    assert options.precision_for([]) is Precision.AUTO


def test_rules_that_split_a_region_are_an_error():
    options = ours({"moe.precision_rules": [("*.0.experts.up", "fp8")]})
    with pytest.raises(OptionError, match=r"layers.0.experts.up: fp8, layers.0.experts.down: auto"):
        options.precision_for(["layers.0.experts.up", "layers.0.experts.down"])


def test_the_keys_are_those_of_the_readme_table():
    assert KEYS == tuple(
        "moe." + name
        for name in (
            "precision precision_rules require verify recompute mode weight_cache kernel "
            "ep_max_tokens ep_capacity strict"
        ).split()
    )
