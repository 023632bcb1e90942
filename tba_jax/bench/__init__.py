# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one module per part, all with `--json`."""
