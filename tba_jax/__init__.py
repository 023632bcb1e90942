# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance with Asynchrony in JAX. Importing the package imports nothing heavy."""

__version__ = "0.1.0"
