# SPDX-License-Identifier: Apache-2.0
"""The type checker of tests: beartype, for which an int is also a float, as for other checkers."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
