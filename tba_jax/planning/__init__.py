# SPDX-License-Identifier: Apache-2.0
"""What the `plan` command is made of: chips, shapes, programs, their cost, and the verdict."""
