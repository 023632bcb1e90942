# SPDX-License-Identifier: Apache-2.0
"""Text rewards, and the pool of processes that runs them."""
