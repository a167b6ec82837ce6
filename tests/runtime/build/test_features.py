"""Features of the scheduler: those of the configuration, and those of packages outside the tree."""

from scheduler_configs import scheduler_config

from aiakq.registry import Registry
from aiakq.runtime.build import features
from aiakq.runtime.build.features import new_scheduler
from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.planner import DraftPlanner


def kinds(**fields):
    return [type(resource) for resource in new_scheduler(scheduler_config(**fields), PagePool(8, 4)).resources]


def test_a_scheduler_has_the_features_of_its_configuration():
    assert kinds() == []
    assert kinds(speculation=SpeculationConfig()) == [DraftPlanner]
    assert kinds(speculation=SpeculationConfig(), lora=LoraConfig()) == [AdapterResource, DraftPlanner]


def test_packages_outside_the_tree_add_features(tmp_path, monkeypatch):
    info = tmp_path / "quota-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quota\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aiakq.resources]\nquota = quota_of_four:new_quota\n")
    (tmp_path / "quota_of_four.py").write_text(
        "from aiakq.runtime.engine.resources import Resource\n"
        "class Quota(Resource): pass\n"
        "def new_quota(config, pool): return Quota() if config.max_num_seqs == 4 else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(features, "RESOURCES", Registry("aiakq.resources", dict(features.RESOURCES)))
    assert [kind.__name__ for kind in kinds(max_num_seqs=4)] == ["Quota"]
    assert kinds(max_num_seqs=5) == []
