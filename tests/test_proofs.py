"""Every proof of the recogniser holds something up."""

from __future__ import annotations

from tests import proofs


def test_deleting_any_proof_lets_a_near_miss_through() -> None:
    broken = proofs.needed()
    assert len(broken) >= 30
    words = proofs.sites()
    assert {site: words[site] for site, names in broken.items() if not names} == {}
