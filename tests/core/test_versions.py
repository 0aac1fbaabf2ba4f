"""Which versions differ, and what to install where."""

from __future__ import annotations

from gpulayer_mesh.core.versions import differ, fix
from gpulayer_mesh.errors import Versions

A = Versions("a", "2.13.0", "3.11.7", "0.1.0")


def test_equal_versions_are_no_difference() -> None:
    assert differ([A, Versions("b", "2.13.0", "3.11.7", "0.1.0")]) == []


def test_patch_and_build_are_a_difference() -> None:
    other = Versions("b", "2.13.0+cu126", "3.11.9", "0.1.0")
    assert differ([A, other]) == ["torch", "Python"]


def test_most_decide_then_the_newer_and_never_the_lack_of_it() -> None:
    old = Versions("b", "2.9.0", "3.11.7", "0.1.0")
    assert fix([A, old]) == "to make them alike, install torch 2.13.0 on b"
    assert fix([A, old, Versions("c", "2.9.0", "3.11.7", "0.1.0")]).endswith("torch 2.9.0 on a")
    none = [Versions(name, "none", "3.11.7", "0.1.0") for name in "bcdef"]
    assert fix([A, *none]).endswith("torch 2.13.0 on b, c, d, ...")
