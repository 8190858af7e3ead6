"""What users of other libraries have asked for or complained about: where each is tested here.

Issues that concern how a library behaves are tests, here or elsewhere; the numbers group what says
the same. An issue is named by its project and number on GitHub.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs

TESTS = Path(__file__).parent

# The project's issue, and the test that shows the behaviour here.
COVERED = {
    1: ("jmp#47, examples fail", "test_readme.py::test_python_blocks_run"),
    2: ("jmp#18, a floor below 1", "test_rules.py::test_the_scale_survives_300_steps_one_way"),
    3: ("jmp#44, a floor lost", "test_rules.py::test_the_floor_survives_jit"),
    5: (
        "flax#2547, infinite scale",
        "test_rules.py::test_after_120_doublings_the_scale_comes_down",
    ),
    6: ("keras#19244, JAX loops", "test_keras_fit.py::test_a_loop_of_ones_own"),
    8: ("tf-keras#644, scale < 1", "test_goldens.py::test_scale_falls_below_one_as_recorded"),
    9: (
        "keras#14829, accumulation",
        "test_accumulation.py::test_float16_variables_accumulate_in_float32",
    ),
    10: (
        "keras#17225, use_ema",
        "test_loss_scale_optimizer.py::test_options_act_from_either_place",
    ),
    12: (
        "levanter#122, scaling for float16",
        "test_transformation.py::test_small_gradients_survive_and_large_ones_are_seen",
    ),
    15: ("equinox#221, examples", "test_examples.py::test_all_libraries_train_alike"),
    17: ("optax#1444, small updates", "test_mesh.py::test_master_weights_keep_small_updates"),
    18: (
        "jax#27496, sums in half precision",
        "test_distributed.py::test_a_sum_that_jax_puts_in_is_taken_in_float32",
    ),
    21: ("pytorch#99640, scale < 1", "test_rules.py::test_the_scale_survives_300_steps_one_way"),
    22: (
        "pytorch#98828, infinite scale",
        "test_rules.py::test_the_scale_survives_300_steps_one_way",
    ),
    23: ("pytorch#157436, scale of 5e-23", "test_rules.py::test_legal_edges"),
    24: (
        "pytorch#40497, NaN for ever",
        "test_rules.py::test_training_goes_on_after_a_storm_of_bad_batches",
    ),
    25: (
        "pytorch#96755, overflow in unscaling",
        "test_gradients.py::test_an_overflow_in_unscaling_skips_the_step",
    ),
    31: (
        "apex#777, division by a scale of 0",
        "test_rules.py::test_after_200_overflows_a_finite_step_is_finite",
    ),
    32: ("DeepSpeed#2911, inf or NaN", "test_telemetry.py::test_a_report_in_words"),
    33: (
        "apex#192, which tensor",
        "test_telemetry.py::test_a_planted_element_is_reported_as_its_tensor",
    ),
    34: (
        "transformers#11274, which tensor",
        "test_telemetry.py::test_a_planted_element_is_reported_as_its_tensor",
    ),
    35: ("chainer#6199, what was zeroed", "test_underflow.py::test_shares_are_those_of_a_cast"),
    38: ("Lightning#9330, clipping", "test_properties.py::test_powers_of_two_change_nothing"),
    40: (
        "pytorch#74739, float16 gradients",
        "test_gradients.py::test_unscaling_is_never_done_in_half",
    ),
    41: ("nerfacc#307, not unscaled", "test_compat.py::test_forgotten_calls_are_noticed"),
    43: (
        "apex#183, fixed or dynamic",
        "test_loss_scale_optimizer.py::test_a_fixed_scale_checks_and_skips",
    ),
    48: (
        "fairscale#834, scales of parts",
        "test_transformation.py::test_several_parts_have_a_scale_each",
    ),
    49: (
        "accelerate#1714, transfers",
        "test_compiled.py::test_nothing_is_transferred_after_the_first_step",
    ),
    50: ("pytorch#120814, breaks", "test_compiled.py::test_compiled_step_has_no_host_callback"),
    51: (
        "pytorch#26512, waiting",
        "test_telemetry.py::test_a_compiled_step_returns_it_and_waits_for_nothing",
    ),
    52: (
        "pytorch#97415, fused and not",
        "test_properties.py::test_pure_compiled_and_uncompiled_steps_agree",
    ),
    53: (
        "pytorch#120003, sharded",
        "test_mesh.py::test_one_bad_element_anywhere_is_found_everywhere",
    ),
    55: (
        "fairseq2#54, floor and logs",
        "test_telemetry.py::test_an_optimizer_tells_what_the_step_was_like",
    ),
    56: ("verl#6150, sharded", "test_mesh.py::test_a_bad_replica_skips_everywhere"),
    57: ("accelerate#4289, scale not saved", "test_resume.py::test_orbax"),
    58: ("composer#1376, scaler not saved", "test_resume.py::test_a_dictionary_of_arrays"),
    60: (
        "verl#4036, growth in short runs",
        "test_adaptive.py::test_a_start_that_is_too_low_is_over_after_one_step",
    ),
    64: ("OLMo#524, float16 unscaled", "test_demo.py::test_unscaled_float16_suffers"),
    66: ("AnimaLoraStudio#316, underflow", "test_demo.py::test_scaling_saves_the_small_elements"),
}
# No behaviour of a library like this one, in one word.
ELSEWHERE = {
    4: ("jmp#28", "performance"),
    14: ("flax#3623", "internals"),
    19: ("jax#15107", "performance"),
    20: ("mixed_precision_for_JAX#3", "documentation"),
    36: ("onnxruntime#10355", "internals"),
    37: ("maskrcnn-benchmark#1034", "documentation"),
    59: ("OpenRLHF#1155", "integration"),
    61: ("torchtitan#2356", "integration"),
    62: ("torchforge#513", "integration"),
    63: ("Megatron-LM#2102", "integration"),
    65: ("Precision-RL", "integration"),
    70: ("pytorch#42226", "documentation"),
}


def functions(path):
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def numbers_here():
    for name in functions(Path(__file__)):
        if found := re.match(r"test_issue((?:_\d\d)+)_[a-z]", name):
            yield from map(int, found[1].split("_")[1:])


def test_every_issue_has_its_place():
    """Each of the 70 is a test here, a test elsewhere that exists, or none of ours."""
    places = [*numbers_here(), *COVERED, *ELSEWHERE]
    assert sorted(places) == [*range(1, 71)]
    for _, place in COVERED.values():
        file, name = place.split("::")
        assert name in functions(next(TESTS.rglob(file))), place


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
def test_issue_07_42_keras_core_571_the_loss_that_is_shown_is_the_true_one():
    """Neither `minimize` nor the history of Keras's `fit` shows the loss times the scale."""
    w = gs.Variable(3.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.0), initial_scale=2.0**10)
    assert float(opt.minimize(lambda: w**2, [w])) == 9.0

    keras = pytest.importorskip("keras", reason="keras is not installed")
    from gainstage.interop.keras import LossScaleOptimizer

    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), 2.0**10), "mse")
    history = model.fit(np.ones((4, 2)), np.zeros((4, 1)), verbose=0).history
    assert history["loss"] == [4.0]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
@pytest.mark.parametrize("kind", ["ours", "keras"])
def test_issue_11_13_keras_19534_what_fp8_layers_measure_is_kept(kind):
    """A variable that its gradient overwrites is not unscaled, averaged, clipped or decayed."""
    keras = pytest.importorskip("keras", reason="keras is not installed")
    from gainstage.interop.keras import LossScaleOptimizer

    options = {"weight_decay": 0.5, "clipnorm": 1.0, "gradient_accumulation_steps": 2}
    lib = gs if kind == "ours" else keras.optimizers
    weight, largest = keras.Variable(1.0), keras.Variable(0.0)
    largest.overwrite_with_gradient = True
    opt = LossScaleOptimizer(lib.SGD(0.5, momentum=0.9, **options), initial_scale=8.0)
    opt.build([weight, largest])
    for measured in (3.0, 5.0):
        opt.apply([jnp.float32(8.0), jnp.float32(measured)], [weight, largest])
    assert float(largest.value) == 5.0
    assert float(weight.value) == 1.0 - 0.25 - 0.5


@pytest.mark.parametrize(
    "name", ["adam", "adamw", "adan", "amsgrad", "lion", "nadam", "novograd", "radam", "rmsprop",
             "yogi"],
)  # fmt: skip
def test_issue_16_optax_1754_float16_gradients_of_zero_give_no_nan(name):
    """Whatever optax's rule divides by, it is done in float32, where its epsilon is not 0."""
    tx = gs.loss_scaled(getattr(optax, name)(0.125))
    params = jnp.ones(3, jnp.float16)
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in (0.0, 0.0, 6e-8):
        updates, state = update(jnp.full(3, gradient, jnp.float16), state, params)
        assert np.isfinite(updates).all()


def test_issue_26_27_28_29_30_deepspeed_1958_at_the_floor_a_run_goes_on_and_can_be_asked():
    """40 bad steps end no run: the scale stays at its floor, and it is known how many and where."""
    w, b = gs.Variable([1.0, 1.0], name="w"), gs.Variable(1.0, name="b")
    rule = gs.DynamicLossScale(8.0, min_scale=1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.5), rule=rule, telemetry=True)
    for _ in range(40):
        opt.apply([[np.inf, 0.0], 0.0], [w, b])
    info = gs.telemetry(opt)
    assert (float(opt.loss_scale), int(info.skipped_steps), bool(info.finite)) == (1.0, 40, False)
    assert str(gs.report(opt)).splitlines()[1] == "w: 40 of 40, all inf, steps 0 to 39"
    opt.apply([[1.0, 1.0], 1.0], [w, b])
    assert (w.numpy().tolist(), float(b)) == ([0.5, 0.5], 0.5)


def test_issue_39_pytorch_67590_a_skipped_step_does_not_move_the_schedule():
    """After two skipped steps of five, the rates were those of three steps."""
    rate = gs.schedules.ExponentialDecay(1.0, 1, 0.5)
    grads = [1.0, np.inf, 1.0, np.nan, 1.0]
    w, params = gs.Variable(0.0), jnp.float32(0.0)
    opt = gs.LossScaleOptimizer(gs.SGD(rate), initial_scale=1.0)
    tx = gs.loss_scaled(optax.sgd(rate))
    state = tx.init(params)
    for gradient in grads:
        opt.apply([gradient * opt.loss_scale], [w])
        updates, state = tx.update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert float(w) == float(params) == -1.75
    assert (int(opt.iterations), float(opt.learning_rate)) == (3, 0.125)


def test_issue_44_47_apex_232_two_losses_have_two_scales():
    """Of two optimizers, as a GAN has, an overflow in one neither skips nor halves the other."""
    real, fake = gs.Variable(1.0), gs.Variable(1.0)
    rule = gs.DynamicLossScale(8.0, 100)
    ours = {v: gs.LossScaleOptimizer(gs.SGD(0.25), rule=rule) for v in (real, fake)}
    for bad in (False, True, False):
        ours[fake].minimize(lambda: fake * real.value(), [fake])
        ours[real].minimize(lambda bad=bad: real * (jnp.inf if bad else 1.0), [real])
    assert (float(ours[fake].loss_scale), float(ours[real].loss_scale)) == (8.0, 4.0)
    assert (float(real), float(fake)) == (0.5, 1.0 - 0.25 * (1.0 + 0.75 + 0.75))


def test_issue_45_46_bmtrain_39_one_loss_has_one_scale():
    """Two rules for the parts of one model share scale and verdict: both step, or neither does."""
    parts = optax.multi_transform({"a": optax.sgd(0.5), "b": optax.adam(0.5)}, {"w": "a", "v": "b"})
    tx, params = gs.loss_scaled(parts, gs.DynamicLossScale(8.0)), {"w": 1.0, "v": 1.0}
    state = tx.init(params)
    for w, moved in ((jnp.nan, False), (1.0, True)):
        grads = {"w": jnp.float32(w), "v": jnp.float32(1.0)}
        updates, state = tx.update(grads, state, params)
        assert [float(u) != 0 for u in jax.tree.leaves(updates)] == [moved, moved]
    assert float(gs.loss_scale(state)) == 4.0


def test_issue_54_deepspeed_90_a_fixed_scale_with_divided_state():
    """A static scale and state that is divided over a mesh take the steps of one device."""
    mesh = jax.make_mesh((8,), ("data",))
    start = np.arange(16, dtype=np.float32)
    weights = []
    for over, place in ((None, None), ("data", NamedSharding(mesh, PartitionSpec()))):
        w = gs.Variable(jax.device_put(start, place))
        inner = gs.SGD(0.5, momentum=0.5, shard_state_over=over)
        opt = gs.LossScaleOptimizer(inner, 4.0, dynamic=False)
        for factor in (1.0, np.inf, 2.0):
            opt.apply([np.full(16, factor, np.float32)], [w])
        assert float(opt.loss_scale) == 4.0
        weights.append(w.numpy())
    np.testing.assert_array_equal(*weights)
    assert weights[0].tolist() == (start - 0.125 - 0.0625 - 0.25).tolist()


def test_issue_67_68_69_prime_rl_1961_a_skipped_microbatch_does_not_count():
    """A window of two is two finite microbatches, and is divided by two."""
    w = gs.Variable(0.0)
    opt = gs.LossScaleOptimizer(gs.SGD(1.0, gradient_accumulation_steps=2), initial_scale=8.0)
    for gradient in (2.0, np.nan, 4.0, np.inf, 6.0, 8.0):
        opt.apply([gradient * opt.loss_scale], [w])
    assert (float(w), int(opt.iterations)) == (-3.0 - 7.0, 2)
