"""Which records are held out: a rule that looks at one record alone."""

import hashlib
from fractions import Fraction

from dpsynth.planning.schema import HashHeldOut
from dpsynth.readers import Record


def is_held_out(record: Record, rule: HashHeldOut) -> bool:
    """Whether the salted hash of the record's own content falls below the declared fraction.

    Neither position nor any other record enters, so that adding or removing one record never
    moves another across the split, and add/remove adjacency holds on each side of it.
    """
    value = int.from_bytes(content_hash(record, rule.salt))
    return value < int(Fraction(rule.fraction) * 2**256)


def content_hash(record: Record, salt: str) -> bytes:
    """SHA-256 of salt, label, shape and pixels, each of unambiguous extent."""
    head = "/".join(map(str, (record.label, *record.image.shape)))
    return hashlib.sha256(
        hashlib.sha256(salt.encode()).digest() + head.encode() + b"\0" + record.image.tobytes()
    ).digest()
