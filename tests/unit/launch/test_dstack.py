"""The task of docs/dstack.md, read by dstack's own parser where it is installed."""

from pathlib import Path

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "dstack.md"


def test_dstack_reads_the_task_of_its_page():
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    text = PAGE.read_text().partition("test: write demo.dstack.yml -->\n```yaml\n")[2].partition("```")[0]
    task = configurations.parse_run_configuration(yaml.safe_load(text))
    assert (task.type, task.nodes, task.commands) == ("task", 2, ["echelon train recipe.yaml"])
    assert task.resources.gpu.name == ["H100"] and task.resources.gpu.count.min == 8
    assert [each.value for each in task.retry.on_events] == ["no-capacity", "interruption"]
