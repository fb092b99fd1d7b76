"""Workers that compute with other kernels say so: by processor, by setting, by what their kernels give."""

import torch

from raypar.actors.numerics_fingerprint import describe_fingerprint_differences, fingerprint_worker_numerics, processor_model
from raypar.job import PrecisionConfig


def of(monkeypatch, **settings):
    with monkeypatch.context() as here:
        for name in ("MKL_CBWR", "ATEN_CPU_CAPABILITY"):
            here.delenv(name, raising=False)
        for name, value in settings.items():
            here.setenv(name, value)
        return fingerprint_worker_numerics(1, torch.device("cpu"))


def test_equal_processes_are_alike(monkeypatch):
    first, second = of(monkeypatch), of(monkeypatch)
    assert not describe_fingerprint_differences([first, second])
    assert first["settings"] == "none" and first["processor"] == processor_model() != ""


def test_a_setting_that_chooses_kernels_is_part_of_what_a_worker_computes_with(monkeypatch):
    plain, bound = of(monkeypatch), of(monkeypatch, MKL_CBWR="COMPATIBLE")
    assert describe_fingerprint_differences([plain, bound]) == ["settings: worker 0 none, worker 1 MKL_CBWR=COMPATIBLE"]
    both = of(monkeypatch, MKL_CBWR="AUTO", ATEN_CPU_CAPABILITY="avx2")
    assert both["settings"] == "MKL_CBWR=AUTO ATEN_CPU_CAPABILITY=avx2"


def test_kernels_for_bfloat16_are_compared_where_a_job_computes_in_it(monkeypatch):
    plain, mixed = (
        fingerprint_worker_numerics(1, torch.device("cpu"), PrecisionConfig(compute=compute)) for compute in (None, "bf16")
    )
    assert plain == of(monkeypatch) and mixed == plain | {"bfloat16_kernels": mixed["bfloat16_kernels"]}
    assert describe_fingerprint_differences([mixed, mixed | {"bfloat16_kernels": "0"}]) == [
        f"bfloat16_kernels: worker 0 {mixed['bfloat16_kernels']}, worker 1 0"
    ]


def test_another_kind_of_processor_is_told(monkeypatch):
    here = of(monkeypatch)
    there = here | {"processor": "GenuineIntel 6 143"}
    assert describe_fingerprint_differences([here, there]) == [
        f"processor: worker 0 {here['processor']}, worker 1 GenuineIntel 6 143"
    ]
