"""The text of code as far as it counts: in one format, without comments, docstrings, declarations and secrets."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

from cutline.base.redaction import HIDDEN
from cutline.fingerprint.secret_texts import (
    SETTERS,
    is_password_name,
    is_setting_name,
    is_value_name,
    without_secrets_of_addresses,
)

_Documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def text_of(node: ast.AST) -> str:
    """What counts of it, in one form."""
    return ast.unparse(ast.fix_missing_locations(_Reduced().visit(copy.deepcopy(node))))


def is_declaration(decorator: ast.expr) -> bool:
    """``@flow.operator(...)``: what it says is in the graph."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "operator"


class _Reduced(ast.NodeTransformer):
    """Without docstrings, declarations of operators, and secrets."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        _drop_docstring(node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(node)

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        _drop_docstring(node)
        node.decorator_list = [one for one in node.decorator_list if not is_declaration(one)]
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        plain = [*node.posonlyargs, *node.args]
        with_default = plain[len(plain) - len(node.defaults) :]
        pairs = zip(with_default, node.defaults, strict=True)
        node.defaults = [_hidden(value) if is_value_name(one.arg) else value for one, value in pairs]
        node.kw_defaults = [
            _hidden(value) if value is not None and is_value_name(one.arg) else value
            for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)
        ]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(_takes_secret(target) for target in node.targets):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None and _takes_secret(node.target):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg is not None and is_value_name(node.arg):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        _hide_values(node, is_password_name)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``.option("password", "…")``, ``.options(**{"token": "…"})``"""
        if _called(node) in SETTERS:
            if len(node.args) > 1 and _is_text(node.args[0], is_setting_name):
                node.args = [node.args[0], *map(_hidden, node.args[1:])]
            for one in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(one, ast.Dict):
                    _hide_values(one, is_setting_name)
            for keyword in node.keywords:
                if keyword.arg is not None and is_setting_name(keyword.arg):
                    keyword.value = _hidden(keyword.value)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(without_secrets_of_addresses(node.value)) if isinstance(node.value, str) else node


def _drop_docstring(node: _Documented) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]


def _takes_secret(target: ast.expr) -> bool:
    """Whether a text that is assigned to it is a secret."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return is_value_name(name)
        case ast.Subscript(slice=key):
            return _is_text(key, is_password_name)
        case _:
            return False


def _is_text(node: ast.expr, fits: Callable[[str], bool]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and fits(node.value)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _hide_values(node: ast.Dict, fits: Callable[[str], bool]) -> None:
    node.values = [
        _hidden(value) if key is not None and _is_text(key, fits) else value
        for key, value in zip(node.keys, node.values, strict=True)
    ]


def _hidden(value: ast.expr) -> ast.expr:
    """Only a text that stands in the code is a secret; where else it comes from is code."""
    return ast.Constant(HIDDEN) if isinstance(value, ast.Constant) and isinstance(value.value, str | bytes) else value
