"""A CUDA error of which only the number is printed is named; other numbers stay as they are."""

import pytest
from job_logs import KNOWN

from saferun.diagnosis.deciding import cuda_codes
from saferun.diagnosis.reading import log_reader


def named(text: str) -> str:
    return cuda_codes.named(log_reader.of_text(text).lines, KNOWN.numbers)[0].text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GPUassert: CUDA error 719 at /w/kernel.cu:33", "cudaErrorLaunchFailure"),
        ("cuCtxSynchronize failed with error 214", "uncorrectable ECC error"),
        ("CUDA failure at fft.cu:77: code=700 (see the manual)", "cudaErrorIllegalAddress"),
        ("cudaMalloc failed, error code 46", "busy or unavailable"),
        ("CUDA error: 59, in loss_kernel<<<8, 256>>>", "device-side assert"),
        ("Error: Curand error 203 - rand.cpp:74: create(&generator)", "initialization failed"),
        ("CuCtxSynchronize failed with error 214", "uncorrectable ECC error"),
        ("CURESULT ERROR=214", "uncorrectable ECC error"),
        ("cuBLAS error 13 at gemm.cu:9", "CUBLAS_STATUS_EXECUTION_FAILED"),
        ("CUBLAS error: 1", "CUBLAS_STATUS_NOT_INITIALIZED"),
        ("cuDNN error 8, in conv", "CUDNN_STATUS_EXECUTION_FAILED"),
        ("cufft failed (2)", "CUFFT_ALLOC_FAILED"),
    ],
)
def test_a_number_is_named(text, name):
    assert name in named(text)


@pytest.mark.parametrize(
    "text",
    [
        "Command 'python fit.py --device cuda' returned non-zero exit status 2.",
        "fit.py on cuda:0 ended with exit code 101",
        "device cuda: failed 35 of 99 tests",
        "cuda validation error: 100.0",
        "CUDA error 12.1",
        "cuDNN error: version 8 is not 9.1",
        "cublas workspace: 13",
        "cublas mode: 13",
        "step 700 on cuda:0, loss 0.719",
        "RuntimeError: cuda runtime error (700) : cudaErrorIllegalAddress",
    ],
)
def test_a_number_that_is_no_cuda_code_stays_as_it_is(text):
    assert named(text) == text
