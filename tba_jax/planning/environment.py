# SPDX-License-Identifier: Apache-2.0
"""Environment variables with which libtpu compiles for TPUs that are not attached.

With them, libtpu does not look for TPUs and takes no TPU from another process. They must be set
before JAX is imported, so this module imports nothing.
"""

NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
