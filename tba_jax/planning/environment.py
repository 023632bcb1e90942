# SPDX-License-Identifier: Apache-2.0
"""Environment variables with which libtpu compiles for TPUs that are not attached.

With these variables libtpu neither looks for TPUs nor takes a TPU from another process. Set them
before JAX is imported, so this module imports nothing.
"""

NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
