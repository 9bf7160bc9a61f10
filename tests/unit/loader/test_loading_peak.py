"""What loading takes at its worst moment, from the headers."""

from tiny_models import write_model

from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.reading import LoadingPeak, ReadStep, loading_peak


def test_the_tensor_in_hand_and_the_mapped_file_count_where_they_meet():
    steps = [ReadStep(10, 1000, 5), ReadStep(100, 0, 50)]
    assert loading_peak(steps, 2, 0) == LoadingPeak(resident=20 + 1000 + 5, needed=1020)


def test_the_largest_matrix_is_there_twice_while_it_is_packed():
    steps = [ReadStep(10, 0, 5), ReadStep(100, 0, 50)]
    assert loading_peak(steps, 2, 100) == LoadingPeak(resident=220 + 200 + 50, needed=420)


def test_nothing_takes_nothing():
    assert loading_peak([], 4, 0) == LoadingPeak(0, 0)


def test_every_weight_is_read_once(tmp_path):
    for load_format in ("safetensors", "dummy"):
        checkpoint = open_checkpoint(write_model(tmp_path / load_format), load_format)
        steps = checkpoint.read_steps()
        assert sum(step.elements for step in steps) == checkpoint.num_weights()
        assert checkpoint.loading_peak("float32").needed > checkpoint.weight_bytes("float32")
    assert checkpoint.read_steps()[-1].mapped == 0


def test_a_mapped_file_is_held_but_not_needed(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    peak = checkpoint.loading_peak("float32")
    assert peak.resident - peak.needed == checkpoint.weight_bytes("float32")
