"""Which device a model runs on; and a small model on the GPU backend, in Triton's interpreter."""

import logging

import numpy as np
import pytest

from pykv.config import CacheConfig, LoadConfig
from pykv.engine import devices
from pykv.engine import model as model_module
from pykv.errors import ConfigError, NumericsError, OutOfMemoryError, UnsupportedError


class TestChoice:
    @pytest.mark.parametrize("device", ["gpu", "", "CPU", "os.path", "cpu_attention"])
    def test_devices_that_are_none(self, load, device):
        with pytest.raises(ConfigError, match=r"device '.*' is unknown: it is auto, cpu, cuda or"):
            load(device=device)

    def test_auto_is_the_cpu_where_there_is_no_gpu(self, load, monkeypatch):
        monkeypatch.setattr(devices, "NODES", ())
        assert load(device="auto").plan == load(device="cpu").plan

    @pytest.mark.parametrize(
        ("missing", "gpu_layers", "expected"),
        [(None, "auto", "cuda"), (None, "all", "cuda"), (None, "3", "cuda"), (None, "0", "cpu"),
         ("no driver", "auto", "cpu"), ("no driver", "0", "cpu"), ("no driver", "-1", "cpu")],
    )  # fmt: skip
    def test_auto_asks_for_a_gpu(self, monkeypatch, caplog, missing, gpu_layers, expected):
        monkeypatch.setattr(devices, "NODES", ("/",))
        monkeypatch.setattr(devices, "_missing", lambda: missing)
        with caplog.at_level(logging.WARNING, "pykv"):
            assert devices._device(LoadConfig(gpu_layers=gpu_layers), 2) == expected
        ignored = missing and gpu_layers == "-1"
        assert bool(caplog.records) == bool(ignored)

    @pytest.mark.parametrize("gpu_layers", ["1", "2"])
    def test_a_part_of_the_layers_is_refused_where_there_is_a_gpu(
        self, load, monkeypatch, caplog, gpu_layers
    ):
        monkeypatch.setattr(devices, "NODES", ())
        with caplog.at_level(logging.WARNING, "pykv"):
            assert load(gpu_layers=gpu_layers).dev.name == "cpu"
        assert "-ngl (gpu_layers) has no effect" in caplog.text
        monkeypatch.setattr(devices, "NODES", ("/",))
        monkeypatch.setattr(devices, "_missing", lambda: None)
        with pytest.raises(ConfigError, match=r"has 2 layers and the output.* use all, 3 or more"):
            load(gpu_layers=gpu_layers)

    @pytest.mark.parametrize("device", ["cpu", "reference"])
    def test_layers_are_no_matter_of_other_devices(self, load, caplog, device):
        with caplog.at_level(logging.WARNING, "pykv"):
            assert load(device=device, gpu_layers="0").dev.name == device
            assert not caplog.records
            assert load(device=device, gpu_layers="1").dev.name == device
        assert f"has no effect on --device {device}" in caplog.text

    @pytest.mark.parametrize("error", [ImportError("undefined symbol"), OSError("no libcudart")])
    def test_a_torch_that_is_broken_is_a_reason(self, monkeypatch, error):
        def broken(device):
            raise error

        monkeypatch.setattr(devices, "_module", broken)
        assert devices._missing() == f"torch or triton cannot be imported: {error}"

    @pytest.mark.parametrize("gpu_layers", ["", "none", "1.5", "-2", "٣", "9" * 5000])
    def test_numbers_of_layers_that_are_none(self, gpu_layers):
        with pytest.raises(ConfigError, match="auto, all or a number of layers"):
            LoadConfig(gpu_layers=gpu_layers)

    def test_contradictions_and_missing_gpus(self, load, monkeypatch):
        with pytest.raises(ConfigError, match="contradict"):
            load(device="cuda", gpu_layers="0")
        monkeypatch.setattr(devices, "_missing", lambda: "torch finds none")
        with pytest.raises(UnsupportedError, match="no GPU can be used: torch finds none"):
            load(device="cuda")

    @pytest.mark.parametrize("name", ["torch", "triton"])
    def test_what_is_not_installed_is_named(self, monkeypatch, name):
        found = {"torch", "triton"} - {name}
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda n: n in found or None)
        assert devices._missing() == f"{name} is not installed; pip install 'pykv[gpu]'"


@pytest.fixture
def gpu(monkeypatch, load):
    """`load` for models whose kernels run in Triton's interpreter."""
    pytest.importorskip("triton", reason="the GPU's compiler is not installed")
    pytest.importorskip("torch", reason="the GPU's tensors are not installed")
    from pykv.backends import cuda

    def start(**settings):
        with monkeypatch.context() as patch:
            patch.setattr(
                model_module, "backend",
                lambda config, *_: cuda.create(device="cpu", deterministic=config.deterministic),
            )  # fmt: skip
            return load(**settings)

    return start


class TestGpu:
    def test_greedy_and_drawn_texts_are_the_cpus(self, gpu, load, small):
        how = {"recite": True, "cache": CacheConfig("q8_0", "q8_0", residual=0), "ctx_size": 128}
        ours, theirs = gpu(**how), load(**how)
        prompt = "x" * 64 + "\n"  # a page becomes full while the answer comes
        answers = [m.generate(prompt, max_tokens=5) for m in (ours, theirs)]
        assert "".join(answers[0]) == "".join(answers[1]) == small.RECITED[:5]
        assert "cuda backend" in ours.plan[0]
        drawn = [load(temperature=1.5, seed=4), gpu(temperature=1.5, seed=4)]
        texts = ["".join(m.generate("the", max_tokens=3)) for m in drawn]
        assert texts[0] == texts[1]

    def test_a_gpu_reads_and_decodes_while_it_is_loaded(self, gpu, monkeypatch):
        from pykv.backends import cuda

        kinds, real = [], cuda.CudaBackend.choose

        def choose(self, graph, step, choice):
            kinds.append((step.n_rows, step.positions.tolist()))
            return real(self, graph, step, choice)

        monkeypatch.setattr(cuda.CudaBackend, "choose", choose)
        model = gpu()
        assert kinds == []
        model.dev.warms_up = True
        devices.warm_up(model)
        prompt = list(range(devices.PROMPT))
        assert kinds == [(len(prompt), prompt), (1, [len(prompt)]), (1, [len(prompt) + 1])]
        assert model.store.nbytes == 0

    def test_logits_that_are_no_numbers_end_the_run_and_leave_the_cache(self, gpu, monkeypatch):
        model = gpu()
        session = model.session()
        session.read([1, 2])
        run = model.dev._steps.run

        def broken(*args):
            logits, batch = run(*args)
            return logits + np.inf, batch

        monkeypatch.setattr(model.dev._steps, "run", broken)
        with pytest.raises(NumericsError, match="position 2: a logit is not a finite number"):
            session.generate([3], max_tokens=1).__next__()
        assert len(session) == 2

    def test_what_does_not_fit_is_said_with_the_numbers(self, gpu, monkeypatch):
        from pykv.backends import cuda

        monkeypatch.setattr(cuda.CudaBackend, "free_bytes", lambda self: 400 << 20)
        with pytest.raises(OutOfMemoryError, match=r"400 MiB of GPU memory .*--ctx-size \d+ would"):
            gpu(ctx_size=10**6)
