# SPDX-License-Identifier: Apache-2.0
"""Drawing responses from a policy: token sampling and the batched decoding engine."""
