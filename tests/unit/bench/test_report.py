"""What a measurement writes, and that what could not be written is refused before it begins."""

import json
import sys

import pytest

from octavo.bench.report import OutputArgs, Record, check_outputs, percentile, show_table, summary, write_outputs
from octavo.errors import InvalidInput


def test_a_document_says_what_was_measured_on_what(tmp_path):
    path = tmp_path / "r.json"
    document = Record("throughput", ["--model", "a b"], {"model": "a b", "seed": None}).finish({"elapsed_time": 1.0})
    write_outputs(document, OutputArgs(output_json=str(path)))
    read = json.loads(path.read_text())
    assert read["command"] == "octavo bench throughput --model 'a b'"
    assert read["elapsed_time"] == 1.0 and read["options"] == {"model": "a b"}
    assert read["machine"]["cores"] >= 1 and read["machine"]["memory"] > 0 and read["machine"]["cpu"]
    assert {"octavo", "python", "torch"} <= read["versions"].keys()
    assert all(len(read["machine_load"][when]) == 3 for when in ("before", "after"))


@pytest.mark.parametrize("name", ["output_json", "plot"])
@pytest.mark.parametrize("path", ["/nowhere/r.png", "/proc", ""])
def test_a_file_that_cannot_be_written_is_refused_first(name, path):
    with pytest.raises(InvalidInput, match=name):
        check_outputs(OutputArgs(**{name: path}))


def test_a_picture_without_matplotlib_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInput, match=r"octavo\[bench\]"):
        check_outputs(OutputArgs(plot=str(tmp_path / "p.png")))
    with pytest.raises(InvalidInput, match=r"\.svg"):
        check_outputs(OutputArgs(plot=str(tmp_path / "p.txt")))


def test_percentiles_are_those_of_numpy():
    numpy = pytest.importorskip("numpy")
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert summary([]) is None
    assert summary([2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def test_a_table_in_a_pipe_is_not_cut_off(capsys):
    long = "max_num_seqs=128 enable_prefix_caching=False"
    show_table("sweep", ("setting", *"abcdefgh"), [(long, *[123456.7] * 7, None)], ["[a] note"])
    out = capsys.readouterr().out
    assert long in out and out.count("123457") == 7 and "[a] note" in out
