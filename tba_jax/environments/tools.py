# SPDX-License-Identifier: Apache-2.0
"""Tools for policies: a calculator, Python in a sandbox, and search over a corpus.

The tools are typed functions, as in the argument `tools` of TRL's trainers. Name them in
task.environment, separated by commas, or call them from the methods of an environment.
"""

import ast
import importlib
import json
import math
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_jax.environments.sandbox import run_python

PYTHON_TIMEOUT_S = 5.0
PYTHON_MEMORY_BYTES = 2**30
_MAX_BITS = 4096  # maximum size of an integer
_MAX_CHARACTERS = 1000  # maximum length of an expression, and of a passage

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
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
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, args))
    raise ValueError(f"{ast.unparse(node)[:80]} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is not a real number")
    return value


def python(code: str) -> str:
    """Run Python code and return what it prints.

    The code runs alone, without files, network or earlier results.

    Args:
        code: Python code. The value of the last line is printed if it is an expression.

    Returns:
        The printed text, or an error.
    """
    return run_python(code, timeout_s=PYTHON_TIMEOUT_S, max_memory_bytes=PYTHON_MEMORY_BYTES)


class Corpus:
    """Search for passages of a file by BM25, with the library bm25s.

    The index is built next to the file at the first use. All processes map the index into memory.

    Args:
        path: a .jsonl file of rows {"text"}, or a text file with a passage in each line.
        num_passages: number of passages in a result.
    """

    def __init__(self, path: str, num_passages: int = 3) -> None:
        self._num_passages = num_passages
        self._library = _bm25s()
        folder = Path(f"{path}.{os.stat(path).st_mtime_ns}.bm25s")
        if not folder.exists():
            self._build(Path(path), folder)
        load = self._library.BM25.load
        self._index = load(folder, mmap=True, load_corpus=True, show_progress=False)

    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: Words to search for.

        Returns:
            The passages that fit best.
        """
        words = self._library.tokenize([query], return_ids=False, show_progress=False)
        num = min(self._num_passages, self._index.scores["num_docs"])
        found, scores = self._index.retrieve(
            words, k=num, backend_selection="numpy", show_progress=False
        )
        texts = [
            row["text"][:_MAX_CHARACTERS]
            for row, score in zip(found[0], scores[0], strict=True)
            if score > 0
        ]
        return "\n\n".join(texts) or "no passage has these words"

    def _build(self, path: Path, folder: Path) -> None:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        is_json = path.suffix == ".jsonl"
        texts = [json.loads(line)["text"] if is_json else line for line in lines]
        if not texts:
            raise ValueError(
                f"the corpus {path} has no passages. Write one passage in each line; in a .jsonl "
                'file, an object {"text": PASSAGE}'
            )
        index = self._library.BM25()
        index.index(self._library.tokenize(texts, show_progress=False), show_progress=False)
        own = tempfile.mkdtemp(prefix=folder.name, dir=folder.parent)
        index.save(own, corpus=[{"text": text} for text in texts], show_progress=False)
        try:
            os.rename(own, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(own)  # another process was faster


def _bm25s() -> Any:
    """Import and return bm25s without JAX, because bm25s would initialise JAX's devices."""
    has_jax = "jax" in sys.modules
    if not has_jax:
        sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
    try:
        return importlib.import_module("bm25s")
    except ImportError as error:
        raise ImportError("Corpus needs the library bm25s. Run pip install bm25s") from error
    finally:
        if not has_jax:
            del sys.modules["jax"]
