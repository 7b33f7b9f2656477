"""The trainer has few parts, and every attribute is declared in a constructor."""

import ast
import inspect
from dataclasses import fields

from echelon.run.training import run_log as accounting
from echelon.run.training import saver as saving
from echelon.run.training import trainer, training_step


def test_the_trainer_has_few_parts():
    assert len(fields(trainer.Trainer)) <= 12
    assert len(fields(training_step.TrainingStep)) <= 6


def test_no_attribute_is_created_outside_the_constructor():
    for module in (accounting, saving, trainer, training_step):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                born, declared = assigned(node)
                assert born <= declared, f"{node.name}: {born - declared}"


def assigned(kind):
    """The attributes of `self` that methods assign, and those declared in the constructor or the class."""
    born, declared = set(), {each.target.id for each in kind.body if isinstance(each, ast.AnnAssign)}
    for method in kind.body:
        if isinstance(method, ast.FunctionDef):
            targets = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
            names = {
                node.attr for node in targets
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
            }  # fmt: skip
            (declared if method.name == "__init__" else born).update(names)
    return born, declared
