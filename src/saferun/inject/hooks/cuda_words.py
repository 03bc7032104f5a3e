"""The words by which CUDA's errors are known: written by tools/cuda_words.py, not by hand.

From the signs of knowledge/failures.yaml, in their order: the kind; what an error says, as parts
that follow each other; what must be in the same error, if anything; what must not be in it.
"""

# fmt: off
MEMORY = (
    ('cuda-oom', ('resource_exhausted: ',), ('jaxlib', 'xlaruntimeerror', 'jax'), ()),  # noqa: E501
    ('cuda-oom', ('resource exhausted: ',), ('jaxlib', 'xlaruntimeerror', 'jax'), ()),  # noqa: E501
    ('cuda-oom-other-process', ('runtime implicit initialization on gpu', 'status: out of memory'), (), ()),  # noqa: E501
    ('cuda-oom-other-process', ('cudasetdevice() on gpu', 'status: out of memory'), (), ()),  # noqa: E501
    ('cuda-oom-other-process', ('cuda_error_out_of_memory',), ('cuctxcreate', 'cudeviceprimaryctxretain', 'torch._c._cuda_init()'), ('tried to allocate', 'failed to allocate', 'failed to alloc', 'cumemalloc')),  # noqa: E501
    ('cuda-oom-other-process', ('cuda error: out of memory',), ('cuctxcreate', 'cudeviceprimaryctxretain', 'torch._c._cuda_init()'), ('tried to allocate', 'failed to allocate', 'failed to alloc', 'cumemalloc')),  # noqa: E501
    ('cuda-oom-other-process', ('cuctxcreate', 'out of memory'), ('cuctxcreate', 'cudeviceprimaryctxretain', 'torch._c._cuda_init()'), ('tried to allocate', 'failed to allocate', 'failed to alloc', 'cumemalloc')),  # noqa: E501
    ('cuda-oom-other-process', ('cudeviceprimaryctxretain', 'out of memory'), ('cuctxcreate', 'cudeviceprimaryctxretain', 'torch._c._cuda_init()'), ('tried to allocate', 'failed to allocate', 'failed to alloc', 'cumemalloc')),  # noqa: E501
    ('cuda-oom', ('out of memory error on gpu',), (), ()),  # noqa: E501
    ('cuda-oom', ('hip out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('xpu out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('npu out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda error: out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('hip error: out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('tried to allocate', 'already allocated'), (), ()),  # noqa: E501
    ('cuda-oom', ('out of gpu memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('gpu out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('tried to allocate', 'of which'), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda runtime error (2)',), (), ()),  # noqa: E501
    ('cuda-oom', ('error=2 : out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda driver error: out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('triton error [cuda]: out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda memory allocation failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('cudamalloc', 'out of memory'), (), ()),  # noqa: E501
    ('cuda-oom', ('cumemalloc', 'out of memory'), (), ()),  # noqa: E501
    ('cuda-oom', ("cuda error 2 'out of memory",), (), ()),  # noqa: E501
    ('cuda-oom', ('no available memory for the cache blocks',), (), ()),  # noqa: E501
    ('cuda-oom', ('larger than the available kv cache memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('error 2: out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cudasuccess (2 vs. 0)',), (), ()),  # noqa: E501
    ('cuda-oom', ('including non-pytorch memory, this process has',), (), ()),  # noqa: E501
    ('cuda-oom', ('_error_out_of_device_memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('_error_out_of_resources',), (), ()),  # noqa: E501
    ('cuda-oom', ('kiogpucommandbuffercallbackerroroutofmemory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cudaerrormemoryallocation',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda_error_out_of_memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda error', 'out of memory'), (), ()),  # noqa: E501
    ('cuda-oom', ('cufft_alloc_failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('cudnn_status_alloc_failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('cusolver_status_alloc_failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('cusparse_status_insufficient_resources',), (), ()),  # noqa: E501
    ('cuda-oom', ('cusparse_status_alloc_failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('cusparse', 'insufficient resources'), (), ()),  # noqa: E501
    ('cuda-oom', ('curand_status_allocation_failed',), (), ()),  # noqa: E501
    ('cuda-oom', ('out of memory. tried to allocate',), (), ()),  # noqa: E501
    ('cuda-oom', ('is reserved by pytorch but unallocated',), (), ()),  # noqa: E501
    ('cuda-oom', ('mps backend out of memory',), (), ()),  # noqa: E501
    ('cuda-oom', ('cuda failure', 'out of memory'), (), ()),  # noqa: E501
    ('cuda-oom', ('failed to cuda calloc',), (), ()),  # noqa: E501
    ('cuda-oom', ('failed to cuda malloc',), (), ()),  # noqa: E501
    ('cuda-oom', ('failed to alloc',), ('nccl',), ('dataloader', 'host memory', 'oom-kill')),  # noqa: E501
    ('cuda-oom', ('out of memory',), ('nccl',), ('dataloader', 'host memory', 'oom-kill')),  # noqa: E501
)
STICKY = (
    ('device-side-assert', ('device-side assert triggered',), (), ()),  # noqa: E501
    ('device-side-assert', ('cudaerrorassert',), (), ()),  # noqa: E501
    ('device-side-assert', ('cuda_error_assert',), (), ()),  # noqa: E501
    ('device-side-assert', ('index out of bounds', 'assertion'), (), ()),  # noqa: E501
    ('device-side-assert', ('device-side assertion `',), (), ()),  # noqa: E501
    ('device-side-assert', ('assertion', 'failed', 'thread: ['), (), ()),  # noqa: E501
    ('device-side-assert', ('assertion `t >= 0 && t < n_classes`',), (), ()),  # noqa: E501
    ('device-side-assert', ('block: [', 'thread: [', 'assertion'), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('triton error [cuda]', 'misaligned address'), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('triton error [cuda]', 'illegal memory access'), (), ()),  # noqa: E501
    ('cuda-launch-timeout', ('launch timed out and was terminated',), (), ()),  # noqa: E501
    ('cuda-launch-timeout', ('cudaerrorlaunchtimeout',), (), ()),  # noqa: E501
    ('cuda-launch-timeout', ('cuda_error_launch_timeout',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('unspecified launch failure',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('misaligned address',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cudaerrorlaunchfailure',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cudaerrormisalignedaddress',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cuda_error_launch_failed',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cuda_error_misaligned_address',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cuda runtime error (4)',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cuda runtime error (74)',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('hardware exception',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('cuda runtime error (719)',), (), ()),  # noqa: E501
    ('cuda-launch-failure', ('access of peer gpu memory over nvlink',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('illegal memory access',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('cudaerrorillegaladdress',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('cuda_error_illegal_address',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('cudaerrorillegalinstruction',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('xid (pci', ': 31,'), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('xid (pci', ': 13,'), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('cuda runtime error (77)',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('cuda runtime error (700)',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('memory access fault by gpu',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('invalid address space',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('kiogpucommandbuffercallbackerrorpagefault',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('illegal instruction was encountered',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('invalid program counter',), (), ()),  # noqa: E501
    ('cuda-illegal-access', ('an illegal instruction',), (), ()),  # noqa: E501
)
