"""Which upstreams there are: written, in a file that changes, behind a DNS name that changes. DNS is played."""

from __future__ import annotations

import asyncio
import logging

import pytest

from server.config.commands import load_proxy_config, read_upstream_file
from server.errors import StartError
from server.proxy.addresses import Address, AddressBook


def look(book):
    return [address.target for address in asyncio.run(book.look())]


def dns(answers):
    async def resolve(host, port):
        answer = answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer

    return resolve


def test_written_addresses_stay():
    book = AddressBook(["b:1", "unix:/x", "a:1", "b:1"])
    assert look(book) == ["b:1", "unix:/x", "a:1"]
    assert not book.changes


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path, caplog):
    file = tmp_path / "upstreams"
    file.write_text("# replicas\na:1\n\n  b:2  # the second\n")
    book = AddressBook(["z:9"], file)
    assert book.changes and look(book) == ["z:9", "a:1", "b:2"]
    file.write_text("c:3\n")
    assert look(book) == ["z:9", "c:3"]
    with caplog.at_level(logging.WARNING):
        for text, said in (("c:3\nd\n", "line 2: 'd' must be host:port"), ("", "has no address"), (None, "cannot be read")):
            file.unlink() if text is None else file.write_text(text)
            assert look(book) == look(book) == ["z:9", "c:3"]
            assert [record.message for record in caplog.records if said in record.message]
    assert len(caplog.records) == 3  # each once
    file.write_text("e:5")
    assert look(book) == ["z:9", "e:5"]


def test_a_name_stands_for_all_its_addresses(caplog):
    answers = {"replicas": ["10.0.0.1", "10.0.0.2"], "six": ["::1"], "later": OSError("no such name")}
    book = AddressBook(["dns:replicas:9000", "dns:six:9", "dns:later:9"], resolve=dns(answers))
    assert look(book) == ["10.0.0.1:9000", "10.0.0.2:9000", "[::1]:9", "dns:later:9"]
    assert asyncio.run(book.look())[0] == Address("10.0.0.1:9000", "replicas")  # whose certificate is asked for
    answers["replicas"] = ["10.0.0.2", "10.0.0.3"]
    answers["later"] = ["10.0.0.9"]
    assert look(book) == ["10.0.0.2:9000", "10.0.0.3:9000", "[::1]:9", "10.0.0.9:9"]
    answers["replicas"] = OSError("the server is down")
    assert look(book)[:2] == ["10.0.0.2:9000", "10.0.0.3:9000"]
    assert [record.message for record in caplog.records] == [
        "--upstream dns:later:9 has no address: no such name",
        "--upstream dns:replicas:9000 has no address: the server is down",
    ]


def test_the_systems_resolver():
    assert "127.0.0.1:7" in look(AddressBook(["dns:localhost:7"]))


def test_options(tmp_path):
    assert load_proxy_config({}, {}).upstream == ("127.0.0.1:9000",)
    file = tmp_path / "upstreams"
    file.write_text("a:1")
    assert load_proxy_config({"upstream_file": str(file)}, {}).upstream == ()
    assert load_proxy_config({"upstream": ["dns:x:1,y:2"]}, {}).upstream == ("dns:x:1", "y:2")
    with pytest.raises(StartError, match="dns:host:port for every address of a name"):
        load_proxy_config({"upstream": ["dns:x"]}, {})
    file.write_text("a:1\nb:99999\n")
    with pytest.raises(StartError, match="line 2: 'b:99999' must be host:port"):
        load_proxy_config({"upstream_file": str(file)}, {})
    file.write_bytes(b"\xff")
    with pytest.raises(StartError, match="cannot be read"):
        read_upstream_file(file)
