"""`experiments.peers` without torch: the finder, the arithmetic, the answers."""

import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from experiments.peers import contention, environment, growth, peer, report, sizes
from experiments.peers.config import Config, Repeats, label


def fake_python(path: Path, body: str) -> Path:
    """An executable shell script that stands in for an interpreter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answers(version: str) -> str:
    return f'echo "{version} /somewhere/python"'


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": str(tmp_path / "path"), "HOME": str(tmp_path / "home"), **more}


class TestFindPython:
    def test_a_shim_that_fails_is_passed_over(self, tmp_path):
        fake_python(tmp_path / "path/python3.11", "echo 'not found' >&2; exit 127")
        good = fake_python(tmp_path / "path/python3", answers("3.11"))
        assert environment.find_python(environ(tmp_path)) == str(good)

    def test_pyenv_versions_newest_first(self, tmp_path):
        fake_python(tmp_path / "path/python3", answers("3.12"))
        for patch in ("2", "10", "11-dev"):
            python = tmp_path / f"home/.pyenv/versions/3.11.{patch}/bin/python"
            fake_python(python, answers("3.11"))
        found = environment.find_python(environ(tmp_path))
        assert found.endswith("versions/3.11.10/bin/python")

    def test_pyenv_root_is_looked_at(self, tmp_path):
        python = tmp_path / "elsewhere/versions/3.11.7/bin/python"
        fake_python(python, answers("3.11"))
        variables = environ(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere"))
        assert environment.find_python(variables) == str(python)

    def test_a_named_interpreter_is_used_or_refused(self, tmp_path):
        good = fake_python(tmp_path / "good", answers("3.11"))
        bad = fake_python(tmp_path / "path/python3.11", answers("3.12"))
        named = environment.find_python(environ(tmp_path, PEERS_PYTHON=str(good)))
        assert named == str(good)
        with pytest.raises(environment.EnvironmentProblem, match=r"is Python 3\.12"):
            environment.find_python(environ(tmp_path, PEERS_PYTHON=str(bad)))

    def test_none_fits_names_every_candidate_in_one_line(self, tmp_path):
        fake_python(tmp_path / "path/python3", answers("3.9"))
        with pytest.raises(environment.EnvironmentProblem) as caught:
            environment.find_python(environ(tmp_path))
        message = str(caught.value)
        assert "python3.11 is not on PATH" in message
        assert "python3 is Python 3.9" in message
        assert "PEERS_PYTHON" in message and "\n" not in message

    def test_a_real_interpreter_is_asked(self):
        fault = environment.probe(sys.executable)
        assert fault == f"is Python {sys.version_info[0]}.{sys.version_info[1]}"


def filled(directory: Path, torch: str, transformers: str) -> Path:
    versions = {"torch": torch, "transformers": transformers, "python": "3.11"}
    fake_python(environment.interpreter(directory), f"echo '{json.dumps(versions)}'")
    return directory


class TestEnsure:
    def run_with(self, directory, own):
        commands = []

        def run(command, what):
            commands.append(list(command))
            if "venv" in command:
                environment.interpreter(directory).parent.mkdir(parents=True)

        python = environment.ensure(
            directory,
            own=own,
            say=lambda line: None,
            find=lambda: "base",
            run=run,
        )
        assert python == environment.interpreter(directory)
        return commands

    @pytest.mark.parametrize("own", [True, False])
    def test_made_at_first_use(self, tmp_path, own):
        commands = self.run_with(tmp_path / "env", own)
        assert commands[0][:3] == ["base", "-m", "venv"]
        assert commands[1][-2:] == ["torch==2.13.0", "transformers==5.24.0"]
        assert (tmp_path / "env" / environment.MARKER).exists()

    def test_a_named_one_is_used_as_it_is(self, tmp_path):
        directory = filled(tmp_path / "env", "2.13.0+cpu", "5.24.0")
        assert self.run_with(directory, own=False) == []

    def test_a_named_one_with_other_versions_is_refused(self, tmp_path):
        directory = filled(tmp_path / "env", "2.13.0", "5.23.1")
        with pytest.raises(environment.EnvironmentProblem, match=r"5\.23\.1"):
            self.run_with(directory, own=False)

    def test_a_named_directory_of_something_else_is_untouched(self, tmp_path):
        (tmp_path / "letter.txt").write_text("dear reader", encoding="utf-8")
        with pytest.raises(environment.EnvironmentProblem, match="lacks"):
            self.run_with(tmp_path, own=False)
        assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]

    def test_an_own_one_that_was_cut_short_is_made_anew(self, tmp_path):
        # The interpreter is there, the marker is not: the installation never ended.
        directory = tmp_path / "env"
        directory.mkdir()
        (directory / "pyvenv.cfg").touch()
        assert len(self.run_with(directory, own=True)) == 2

    def test_a_finished_own_one_is_kept(self, tmp_path):
        directory = filled(tmp_path / "env", "2.13.0", "5.24.0")
        (directory / environment.MARKER).touch()
        assert self.run_with(directory, own=True) == []

    def test_a_failed_installation_leaves_no_marker(self, tmp_path):
        def run(command, what):
            environment._run_visibly(["false"], what)

        with pytest.raises(environment.EnvironmentProblem, match="failed"):
            environment.ensure(
                tmp_path / "env",
                own=True,
                say=lambda line: None,
                find=lambda: "base",
                run=run,
            )
        assert not (tmp_path / "env" / environment.MARKER).exists()


class TestSizes:
    def test_the_preset_has_the_form_that_is_compared(self):
        model = Config().model()
        kinds = [layer.kind for layer in model.layers]
        assert kinds == ["swa", "swa", "csa", "hca", "csa", "hca"]
        sizes_ = (model.hidden_size, model.heads, model.head_dim, model.kv_heads)
        assert sizes_ == (256, 8, 64, 1)
        assert (model.window, model.csa_ratio, model.hca_ratio) == (128, 4, 128)
        assert (model.top_k, model.index_heads, model.index_dim) == (64, 4, 32)

    def test_equal_active_width(self):
        experts = sizes.Experts()
        config = Config().model()
        assert experts.active_width == (3 + 1) * 128 == config.feed_forward_size
        weights = sizes.feed_forward_parameters(256, experts.active_width, 6)
        assert weights == 6 * 3 * 256 * 512
        with pytest.raises(ValueError, match="= 640"):
            sizes.check_equal_active(config, sizes.Experts(per_token=4))
        with pytest.raises(ValueError, match="= 640"):
            Config(experts=sizes.Experts(per_token=4))

    def test_fields_of_the_peer(self):
        fields = sizes.torch_model_fields(Config().model(), sizes.Experts())
        assert fields["layer_types"][2:4] == [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ]
        assert fields["compress_rates"]["heavily_compressed_attention"] == 128
        assert fields["partial_rotary_factor"] * fields["head_dim"] == 16
        assert "hc_mult" not in fields
        json.dumps(fields)
        one = sizes.torch_model_fields(Config().model(), sizes.Experts(), False)
        assert one["hc_mult"] == 1

    def test_other_layer_kinds_are_refused(self):
        config = ha.presets.get("peers_v4").replace(pattern="dense,swa")
        with pytest.raises(ValueError, match="dense"):
            sizes.torch_model_fields(config, sizes.Experts())


def test_cases_of_a_config():
    config = Config(contexts=(100, 2048), transformers=Repeats(2, 1, 3, 16))
    first, longest = config.cases(config.transformers)
    assert (first["name"], first["prefill_repeats"]) == ("100", 2)
    assert (longest["name"], longest["prefill_repeats"]) == ("2k", 1)
    assert config.chunked_case()["name"] == "2k_chunked"
    assert config.chunked_case()["chunk"] == 512
    with pytest.raises(ValueError, match="ascending"):
        Config(contexts=(8192, 1024))


def case(context: int, speed: float, milliseconds: float, suffix: str = "") -> dict:
    return {
        "name": label(context) + suffix,
        "context": context,
        "prefill_tokens_per_s": speed,
        "decode_ms_per_token": milliseconds,
        "one_thread_decode_ms_per_token": milliseconds / 2,
        "step_ms_per_token": milliseconds * 2,
        "logit_difference": 1e-6,
        "decode_s": [milliseconds * 1e-3, milliseconds * 0.5e-3, milliseconds * 2e-3],
        "difference_from_first": 1e-6,
        "largest_logit": 2.0,
    }


def answer(*cases: dict) -> dict:
    keys = ("total", "active")
    counts = {f"parameters_{key}": 5 for key in keys}
    counts |= {f"parameters_{key}_without_embeddings": 4 for key in keys}
    return {
        "cases": list(cases),
        "parameters": {**counts, "feed_forward_active": 3},
        "versions": {"python": "3"},
        "attention": "eager",
        "experts": "grouped_mm",
        "threads": 2,
        "block_tokens": 256,
        "short_logit_difference": 1e-6,
        "measured_at": "2026-11-29T00:00:00+00:00",
        "other_load": 0.01,
    }


@pytest.fixture
def results():
    theirs = [case(1024, 1000.0, 30.0), case(8192, 100.0, 40.0)]
    chunked = case(8192, 800.0, 38.0, "_chunked")
    return {
        "transformers": answer(*theirs, chunked),
        "transformers_one_stream": answer(theirs[0], chunked),
        "hybrid_attn": answer(case(1024, 5000.0, 3.0), case(8192, 4000.0, 2.0)),
        report.FULL: answer(case(1024, 2000.0, 6.0), case(8192, 2500.0, 5.0)),
    }


def test_ratios_say_how_many_times_faster_ours_is(results):
    summary = report.summarise(Config(), results)
    assert summary["peers.prefill_ratio_8k"] == pytest.approx(40.0)
    assert summary["peers.decode_ratio_8k"] == pytest.approx(20.0)
    assert summary["peers.decode_ratio_8k_stepwise"] == pytest.approx(10.0)
    assert summary["peers.full_block_prefill_ratio_8k"] == pytest.approx(25.0)
    assert summary["peers.full_block_decode_ratio_8k"] == pytest.approx(8.0)
    assert summary["peers.full_block_logit_difference_1k"] == 1e-6
    assert summary["peers.decode_ratio_8k_one_thread"] == pytest.approx(10.0)
    assert summary["peers.machine_was_idle"] is True
    assert summary["peers.transformers_decode_ms_fastest_8k"] == 20.0
    assert summary["peers.prefill_ratio_1k"] == pytest.approx(5.0)
    assert summary["peers.decode_ratio_1k"] == pytest.approx(10.0)
    assert summary["peers.prefill_ratio_8k_chunked"] == pytest.approx(5.0)
    assert summary["peers.transformers_prefill_tokens_per_s_8k"] == 100.0
    assert summary["peers.hybrid_attn_decode_ms_per_token_1k"] == 3.0


def test_growth_in_summary_and_report(results):
    found = {"prefilled": 1.1, "decode_growth": 3.0, "step_growth": 2.0}
    for name in ("decode", "step"):
        found |= {f"{name}_ms_4096": 1.5, f"{name}_ms_262144": 4.5}
    results["growth"] = found | {"other_load": 0.0}
    config = Config()
    summary = report.summarise(config, results)
    assert summary["peers.decode_growth_4k_256k"] == 3.0
    assert summary["peers.decode_growth_4k_256k_stepwise"] == 2.0
    assert summary["peers.growth_decode_ms_per_token_256k"] == 4.5
    environment_ = {"cpu_count": 2, "platform": "Linux"}
    text = report.markdown(config, results, summary, environment_, "command")
    assert "1.5, 4.5 ms/token at 4k, 256k through `ha.generate`, × 3;" in text
    with pytest.raises(ValueError, match="two and more"):
        growth.Growth(contexts=(4096,))
    assert report.growth_lines(Config(growth=growth.Growth(contexts=())), {}) == []


def test_a_filled_cache_decodes():
    """Random numbers under the right counts: what a step reads of them is valid."""
    config = ha.presets.get("tiny_csa").replace(pattern="csa")
    cache = growth.filled_cache(config, 64, 8)
    assert cache.length.tolist() == [64] and cache.spec.capacity >= 72
    model = ha.Model(config, rngs=nnx.Rngs(0))
    logits, cache = ha.step(model, cache, np.zeros((1, 1), np.int32))
    assert np.isfinite(logits).all() and not cache.faults.any()
    assert cache.length.tolist() == [65]


@pytest.mark.slow
def test_growth_is_measured():
    config = ha.presets.get("tiny_csa").replace(pattern="csa")
    found = growth.measure(config, growth.Growth((64, 256), 2, 1), lambda line: None)
    assert all(value > 0 for value in found.values())
    assert {"decode_ms_64", "step_ms_256", "decode_growth", "prefilled"} <= set(found)


def test_report_names_its_doubts(results):
    config = Config(growth=growth.Growth(contexts=()))
    environment_ = {"cpu_count": 2, "platform": "Linux"}
    summary = report.summarise(config, results)
    quiet = report.markdown(config, results, summary, environment_, "command")
    assert "| 8k | prefill, tokens/s | 100 | 4,000 | 40 | 2,500 | 25 |" in quiet
    assert "Caution" not in quiet
    results["transformers"]["other_load"] = 0.5
    busy = report.markdown(config, results, summary, environment_, "command")
    assert "used 50 % of the cores" in busy


class TestPeer:
    def test_answer(self, results):
        text = json.dumps(results["transformers"])
        names = ["1k", "8k", "8k_chunked"]
        assert peer.parse_answer(f"a banner\n{text}\n", names)["threads"] == 2
        with pytest.raises(peer.PeerFailed, match="asked for"):
            peer.parse_answer(text, ["1k"])

    @pytest.mark.parametrize("text", ["", "Killed", "{}", "[]", '{"cases": [{}]}'])
    def test_no_answer(self, text):
        with pytest.raises(peer.PeerFailed, match="not the expected JSON"):
            peer.parse_answer(text, ["1k"])

    def test_impossible_figures(self, results):
        results["transformers"]["cases"][0]["decode_ms_per_token"] = 0.0
        with pytest.raises(peer.PeerFailed, match="above 0"):
            names = ["1k", "8k", "8k_chunked"]
            peer.parse_answer(json.dumps(results["transformers"]), names)

    def test_measure_passes_progress_on(self, tmp_path, results):
        (tmp_path / "answer").write_text(json.dumps(results["hybrid_attn"]))
        body = f"cat >{tmp_path}/got; echo '[torch] hello' >&2; cat {tmp_path}/answer"
        python = fake_python(tmp_path / "python", body)
        request = {"cases": [{"name": "1k"}, {"name": "8k"}]}
        said = []
        peer.measure(python, request, said.append)
        assert said == ["transformers: hello"]
        assert json.loads((tmp_path / "got").read_text()) == request

    def test_measure_tells_why_it_failed(self, tmp_path):
        python = fake_python(tmp_path / "python", "echo 'no such module' >&2; exit 3")
        with pytest.raises(peer.PeerFailed, match=r"status 3.*no such module"):
            peer.measure(python, {"cases": []}, lambda line: None)

    def test_our_packages_do_not_reach_it(self):
        variables = {"PATH": "p", "PYTHONPATH": "x", "VIRTUAL_ENV": "y"}
        cleaned = peer.clean_environment(variables)
        assert cleaned["PATH"] == "p" and cleaned["HF_HUB_OFFLINE"] == "1"
        assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(cleaned)


def test_contention_is_what_others_used(monkeypatch):
    busy, own, clock = iter([100.0, 116.0]), iter([5.0, 17.0]), iter([0.0, 10.0])
    monkeypatch.setattr(contention, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(contention, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(contention.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(contention.os, "cpu_count", lambda: 2)
    with contention.Contention() as measured:
        pass
    # 16 s of all, 12 s of ours, 20 s there were.
    assert measured.share == pytest.approx(4 / 20)
