"""The keystream: ChaCha20 as published, a key a draw, nothing kept, nothing inherited."""

import copy
import os
import pickle  # noqa: TID251 - to show that it is refused
import secrets
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.private.keystream import Keys, Stream


def test_the_generator_is_chacha20_of_rfc_8439():
    # Test vector 1 of RFC 8439, appendix A.1: key, nonce and counter zero.
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert Stream(bytes(32)).words(8).tobytes()[:32].hex() == expected


def test_the_counter_goes_on_and_the_whole_key_enters():
    # Test vectors 2 and 3 of the same appendix: counter one; a key whose last byte is one.
    second = "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    assert Stream(bytes(32)).words(16).tobytes()[64:96].hex() == second
    third = "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
    assert Stream(bytes(31) + b"\1").words(16).tobytes()[64:96].hex() == third


@given(st.lists(st.integers(0, 40_000), max_size=4))
def test_a_stream_is_the_same_in_any_pieces(sizes):
    whole, parts = Stream(b"k" * 32).words(sum(sizes)), Stream(b"k" * 32)
    pieces = [parts.words(size) for size in sizes]
    np.testing.assert_array_equal(whole, np.concatenate([np.empty(0, "<u8"), *pieces]))


def test_what_was_in_the_array_never_enters():
    full = np.full(20_000, 2**64 - 1, dtype="<u8")
    Stream(b"k" * 32).fill(full)
    np.testing.assert_array_equal(full, Stream(b"k" * 32).words(20_000))


def test_keys_take_32_bytes_of_system_entropy(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "dpsynth.private.keystream.secrets.token_bytes",
        lambda n: asked.append(n) or os.urandom(n),
    )
    Keys().stream()
    assert asked == [32]


def test_each_draw_has_a_key_of_its_own_and_the_next_key_is_no_part_of_it():
    keys = Keys(b"seed")
    held, drawn = [], []
    for _ in range(5):
        held.append(keys._state.key.tobytes())
        drawn.append(keys.stream().words(1000).tobytes())
    held.append(keys._state.key.tobytes())
    assert len(set(held)) == 6
    assert len(set(drawn)) == 5
    assert not any(key in noise for key in held for noise in drawn)
    # The draw is the stream of the key that was held, and that key is gone.
    assert Stream(held[2]).words(1004).tobytes() == held[3] + drawn[2]


def test_threads_that_share_keys_never_share_a_stream():
    keys, found = Keys(), []

    def draw():
        found.extend(keys.stream().words(2).tobytes() for _ in range(300))

    workers = [threading.Thread(target=draw) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(found)) == 1200


@pytest.mark.parametrize("seed", [None, b"seed"])
def test_a_fork_starts_anew_even_while_a_thread_draws(seed):
    keys = Keys(seed)
    keys.stream()
    read, write = os.pipe()
    with keys._state.lock:  # as if another thread was drawing at the fork
        child = os.fork()
        if child == 0:  # pragma: no cover
            os.write(write, keys.stream().words(4).tobytes())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    theirs = os.read(read, 64)
    os.close(read)
    assert len(theirs) == 32
    assert theirs != keys.stream().words(4).tobytes()


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_keys_are_never_saved_or_copied(way):
    with pytest.raises(TypeError):
        way(Keys())


def test_after_a_fork_no_thread_gets_the_parents_stream(monkeypatch):
    """Taking a new key gives other threads their turn: they must not go on with the old one."""
    keys = Keys()
    keys.stream()
    real = secrets.token_bytes

    def slow(count):
        time.sleep(0.05)
        return real(count)

    monkeypatch.setattr("dpsynth.private.keystream.secrets.token_bytes", slow)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        both = threading.Barrier(2)

        def draw():
            both.wait()
            os.write(writer, keys.stream().words(2).tobytes())

        threads = [threading.Thread(target=draw) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    found = os.read(reader, 64)
    os.close(reader)
    drawn = {found[:16], found[16:], keys.stream().words(2).tobytes()}
    assert len(found) == 32 and len(drawn) == 3
