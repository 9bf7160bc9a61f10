"""What loading takes at its worst moment, from the headers."""

from gguf.constants import GGMLQuantizationType as Type
from tiny_gguf import write_gguf
from tiny_models import LLAMA, random_weights, write_model

from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.reading import LoadingPeak, ReadStep, loading_peak


def peak_of(checkpoint: Checkpoint) -> LoadingPeak:
    """Kept and packed in float32."""
    sizes = [4 * step.elements for step in checkpoint.read_steps()]
    return loading_peak(checkpoint.read_steps(), sizes, sizes)


def test_the_tensor_in_hand_and_the_mapped_file_count_where_they_meet():
    steps = [ReadStep(10, 1000, 5), ReadStep(100, 0, 50)]
    assert loading_peak(steps, [20, 200], [20, 100]) == LoadingPeak(resident=20 + 1000 + 5, needed=1020)


def test_the_largest_matrix_is_there_twice_while_it_is_packed():
    steps = [ReadStep(10, 0, 5), ReadStep(100, 0, 50)]
    assert loading_peak(steps, [20, 200], [20, 200]) == LoadingPeak(resident=420, needed=420)


def test_what_grows_when_it_is_packed_counts_packed():
    steps = [ReadStep(10, 0, 5), ReadStep(100, 0, 50)]
    assert loading_peak(steps, [5, 50], [20, 200]).needed == 220 + 200


def test_nothing_takes_nothing():
    assert loading_peak([], [], []) == LoadingPeak(0, 0)


def test_every_weight_is_read_once(tmp_path):
    for load_format in ("safetensors", "dummy"):
        checkpoint = open_checkpoint(write_model(tmp_path / load_format), load_format)
        steps = checkpoint.read_steps()
        assert sum(step.elements for step in steps) == checkpoint.num_weights()
        assert peak_of(checkpoint).needed > 4 * checkpoint.num_weights()
    assert checkpoint.read_steps()[-1].mapped == 0


def test_a_mapped_file_is_held_but_not_needed(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    peak, weights = peak_of(checkpoint), 4 * checkpoint.num_weights()
    assert peak.resident == 2 * weights
    assert weights < peak.needed < 2 * weights


def test_of_a_gguf_file_one_tensor_is_held_at_a_time(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA), Type.Q8_0)
    steps = open_checkpoint(path).read_steps()
    assert max(step.mapped for step in steps) < sum(step.mapped for step in steps) / 4
