# SPDX-License-Identifier: Apache-2.0
"""One decoder-only language model, the Hugging Face families it covers, and their weights."""
