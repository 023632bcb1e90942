# SPDX-License-Identifier: Apache-2.0
"""The embedded start model (a Hugging Face folder) and the command that makes it."""
