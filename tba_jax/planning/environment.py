# SPDX-License-Identifier: Apache-2.0
"""Environment variables under which libtpu compiles for chips that are not attached.

No TPU is looked for, and none is taken from a process that has it. They must be set before JAX
is imported, hence a module that imports nothing.
"""

NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
