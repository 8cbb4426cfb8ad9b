"""The text of code as far as it counts: in one format, without comments, docstrings, declarations and secrets."""

from __future__ import annotations

import ast
import copy

from cutline.base.redaction import HIDDEN, is_secret_name, without_named_secrets

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

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(_is_secret(target) for target in node.targets):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None and _is_secret(node.target):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg is not None and is_secret_name(node.arg):
            node.value = _hidden(node.value)
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [
            _hidden(value) if key is not None and _is_secret(key) else value
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``.option("password", "…")``"""
        if len(node.args) > 1 and _is_secret(node.args[0]):
            node.args = [node.args[0], *map(_hidden, node.args[1:])]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(without_named_secrets(node.value)) if isinstance(node.value, str) else node


def _drop_docstring(node: _Documented) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]


def _is_secret(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return is_secret_name(name)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return is_secret_name(name)
        case _:
            return False


def _hidden(value: ast.expr) -> ast.expr:
    """Only a text that stands in the code is a secret; where else it comes from is code."""
    return ast.Constant(HIDDEN) if isinstance(value, ast.Constant) and isinstance(value.value, str | bytes) else value
