# SPDX-License-Identifier: Apache-2.0
"""Python in which gs:// and s3:// are the store in FAKE_STORE; a test puts this on the path."""

import fake_store

fake_store.register()
