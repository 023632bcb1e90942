# SPDX-License-Identifier: Apache-2.0
"""Tools for policies: a calculator, and Python in a sandbox.

The tools are typed functions, as in the argument `tools` of TRL's trainers. Name them in
task.environment, separated by commas, or call them from the methods of an environment.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from tba_jax.environments.sandbox import run_python

_MAX_BITS = 4096  # maximum size of an integer
_MAX_CHARACTERS = 1000  # maximum length of an expression


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is not a real number")
    return value


_BINARY: dict[Any, Callable[..., Any]] = {ast.Add: operator.add, ast.Pow: _power}
_BINARY |= {ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_BINARY |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_UNARY: dict[Any, Callable[..., Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "round": round, "min": min, "max": max}
_FUNCTIONS |= {name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan")}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, the operators + - * / // % **, parentheses, pi, and the functions abs,
            round, min, max, sqrt, exp, log, sin, cos and tan, for example "(17 + 4) * 3".

    Returns:
        The value.
    """
    if len(expression) > _MAX_CHARACTERS:
        return f"error: more than {_MAX_CHARACTERS} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id="pi"):
            return math.pi
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, args))
    raise ValueError(f"{ast.unparse(node)[:80]} is not arithmetic")


def python(code: str) -> str:
    """Run Python code and return what it prints.

    The code runs alone, without files, network or earlier results.

    Args:
        code: Python code. The value of the last line is printed if it is an expression.

    Returns:
        The printed text, or an error.
    """
    return run_python(code, timeout_s=5.0, max_memory_bytes=2**30)
