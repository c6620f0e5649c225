"""`check --expect`: two sites prove equal bits by a small file, and nothing else passes for it."""

import copy
import json

import pytest

from dashcupy import cli
from dashcupy.check import expect, record

ARGUMENTS = ["check", "--device", "cpu", "--len", "40", "--kv-len", "50", "--head-dim", "16",
             "--causal", "--schedule", "descending", "--repeats", "1", "--bits", "none"]


@pytest.fixture
def site(tmp_path, capsys):
    """(path of another site's record, function that checks against it after a change)."""
    path = tmp_path / "other.json"
    assert cli.main([*ARGUMENTS, "--json", str(path)]) == 0
    whole = json.loads(path.read_text())
    capsys.readouterr()

    def check(change=lambda made: None, *more):
        other = copy.deepcopy(whole)
        change(other)
        path.write_text(json.dumps(other))
        status = cli.main([*ARGUMENTS, *more, "--expect", str(path)])
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())
    return path, check


def _each_run(made):
    return [run for case in made["cases"] for run in case["runs"]]


def test_equal_digests_prove_equal_bits(site):
    status, text = site[1]()
    assert status == 0
    assert "20 of 20 results are equal, bit for bit" in text and "not comparable" not in text
    assert "(dashcupy 0.1.0 on CPU, numpy-" in text


def test_another_digest_is_a_failure(site):
    def change(made):
        made["cases"][1]["runs"][1]["tensors"][2]["digest"] = "f" * 64
    status, text = site[1](change)
    assert status == 1 and "19 of 20 results are equal" in text
    assert "own shape, deep inputs, causal, descending: dv has digest" in text
    assert "here, ffffffffffffffff there" in text


def test_another_fingerprint_says_which_part_and_proves_nothing(site):
    def change(made):
        for run in _each_run(made):
            run["fingerprint"] = run["fingerprint"].replace(":numpy", ":cc9.0")
    status, text = site[1](change)
    assert status == 1 and "nothing could be compared" in text
    assert "the fingerprints differ (numpy here, cc9.0 there), so bits may" in text


def test_another_arithmetic_proves_nothing(site):
    def change(made):
        made["device"]["arithmetic"] = "nvrtc-13.1"
    status, text = site[1](change)
    assert status == 1 and "arithmetic differs (numpy-" in text and "nvrtc-13.1 there)" in text


def test_other_inputs_prove_nothing(site):
    status, text = site[1](lambda made: None, "--seed", "5")
    assert status == 1 and "the inputs are others (of --seed 0 there)" in text


def test_what_the_other_site_has_not_run_is_told(site):
    def change(made):
        del made["cases"][0]["runs"][1]
        made["cases"][1]["runs"][1].update(tensors=[], refused="needs 64 CTAs")
    status, text = site[1](change)
    assert status == 1 and "14 of 14 results are equal" in text
    assert "normal inputs, causal, descending: there is no such run there" in text
    assert "refused there: needs 64 CTAs" in text


def test_the_command_agrees_with_the_comparison_in_the_record(site):
    """A record with --json and --expect holds the outcome of both."""
    path, check = site
    file = path.with_name("mine.json")
    status, _ = check(lambda made: None, "--json", str(file))
    made = json.loads(file.read_text())
    assert status == 0 and made["ok"] and made["expect"]["n_equal"] == 20
    assert made["expect"]["ok"] and made["expect"]["different"] == []


@pytest.mark.parametrize("content, words", [
    (None, "cannot be read (No such file or directory)"),
    ("{", "not JSON"),
    ("[]", "a record of format None, this dashcupy reads format 1"),
    ('{"format": 99}', "a record of format 99"),
    ('{"format": 1}', "not a whole record"),
])
def test_a_file_that_is_no_record_is_refused(tmp_path, capsys, content, words):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert cli.main([*ARGUMENTS, "--expect", str(path)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


def test_a_record_is_compared_with_itself_whatever_the_order_of_its_keys(site):
    made = record.read_record(str(site[0]))
    other = json.loads(json.dumps(made, sort_keys=True))
    assert expect.compare_records(made, other, "x").ok
