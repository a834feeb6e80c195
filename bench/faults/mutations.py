"""Mutations of files and data, without regard for what they mean: what a reader must survive."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import yaml

NUMBERS = (
    *(1e308, -1e308, 1.7976931348623157e308, 5e-324, -5e-324, 0.0, -0.0, math.nan, math.inf, -math.inf),
    *(0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 1e-300, 1e16, 0.1, 3.5, 1e150, -1e150),
)
OTHERS = (
    *(
        "",
        "text",
        "1e5",
        "nan",
        "NaN",
        "Infinity",
        "0x10",
        "1_000",
        "\x00",
        "\u202e\U0001f600é",
        "a" * 5000,
        "\ud800",
        "%s{}",
    ),
    *(None, True, False, [], [1, 2], [[]], {}, {"a": 1}, {"value": None}, [None], {"": {}}, ["x", {"y": [1.0]}]),
)


def value(random: Random) -> Any:
    """Any value that JSON or YAML can hold."""
    return deepcopy(random.choice(NUMBERS if random.random() < 0.6 else OTHERS))


def mutate_rows(rows: list[Any], random: Random) -> list[Any]:
    """Lines of a log with something wrong in them: values, columns, steps, order, lines that are no objects."""
    rows = deepcopy(rows)
    objects = [row for row in rows if isinstance(row, dict)]
    if not objects:
        return [value(random) for _ in range(random.randint(0, 3))]
    names = list(dict.fromkeys(name for row in objects for name in row)) or ["step"]
    match random.randrange(9):
        case 0:
            random.choice(objects)[random.choice(names)] = value(random)
        case 1:  # a whole column, of one value or of several
            name, values = random.choice(names), [value(random) for _ in range(random.choice([1, 1, 2, 3]))]
            for number, row in enumerate(objects):
                row[name] = values[number % len(values)]
        case 2:  # most columns, of numbers
            number = random.choice(NUMBERS)
            for row in objects:
                row.update(dict.fromkeys(random.sample(names, max(1, len(names) // 2)), number))
        case 3:
            for row in random.sample(objects, max(1, len(objects) // 3)):
                row["step"] = value(random)
        case 4:
            for row in objects:
                row.pop(random.choice(names), None)
        case 5:
            rows.insert(random.randrange(len(rows) + 1), value(random))
        case 6:
            random.shuffle(rows)
            rows += deepcopy(rows[: random.randint(0, len(rows))])
        case 7:
            for number, row in enumerate(objects):
                row["step"] = random.choice([-number, number / 3, str(number), number % 3, 1e300 * number, -(10**20)])
        case 8:
            rows = rows[: random.randint(0, 2)]
    return rows


def mutate_tree(tree: Any, random: Random) -> Any:
    """Nested data with one thing changed anywhere in it."""
    tree = deepcopy(tree)
    if not isinstance(tree, dict | list) or not tree or random.random() < 0.1:
        return value(random)
    node, key = tree, random.choice(_keys(tree))
    while isinstance(node[key], dict | list) and node[key] and random.random() < 0.85:
        node = node[key]
        key = random.choice(_keys(node))
    match random.randrange(5):
        case 0 | 1:
            node[key] = value(random)
        case 2:
            del node[key]
        case 3 if isinstance(node, dict):
            node[random.choice(["unknown", "", 3, None, True, "kl.beta", "é\u202e", f"{key}s", "a" * 3000])] = value(
                random
            )
        case _:
            node[key] = {"deeper": node[key]} if random.random() < 0.5 else [node[key]]
    return tree


def _keys(node: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node)))


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """A file cut, emptied, garbled, or in another encoding."""
    at = random.randrange(len(data) + 1)
    match random.randrange(11):
        case 0:
            return data[:at]
        case 1:
            return b""
        case 2:
            return data[:at] + random.randbytes(random.choice([1, 8, 200])) + data[at:]
        case 3:
            garbled = bytearray(data)
            for _ in range(min(20, len(garbled))):
                garbled[random.randrange(len(garbled))] = random.randrange(256)
            return bytes(garbled)
        case 4:
            return data.decode("utf-8", "replace").encode(random.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-be"]))
        case 5:
            return data.replace(b"\n", random.choice([b"\r\n", b"\r", b"\n\n\n", b"\x00\n"]))
        case 6:
            deep = random.choice([100, 5000, 100000])
            return data[:at] + b"\n" + b'{"a":' * deep + b"1" + b"}" * deep + b"\n" + data[at:]
        case 7:
            return data + b'\n{"step": 1' + b"0" * random.choice([10, 400, 6000]) + b', "kl": 1, "reward": 1}\n'
        case 8:
            return random.randbytes(random.choice([1, 100, 10000]))
        case 9:
            return data.replace(b'"', b"'" if random.random() < 0.5 else b"", random.randint(1, 50))
        case _:
            return data + b'\n{"' + b"k" * 100000 + b'": 1, "reward": ' + b"[" * 50 + b"]" * 50 + b"}\n"


def mutate_file(path: Path, random: Random) -> None:
    """Something wrong in one file, by what it holds where that is text, else by its bytes."""
    changers: dict[str, Callable[[str, Random], str]] = {
        ".jsonl": _jsonl,
        ".json": lambda text, random: _json(mutate_state(json.loads(text), random)),
        ".yaml": lambda text, random: yaml.safe_dump(
            _plain(mutate_tree(yaml.safe_load(text), random)), allow_unicode=True
        ),
        ".csv": _csv,
        ".log": _console,
    }
    change = changers.get(path.suffix)
    data = path.read_bytes()
    if change is not None and random.random() < 0.8:
        try:
            path.write_bytes(change(data.decode("utf-8"), random).encode("utf-8", "surrogatepass"))
            return
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError, csv.Error, yaml.YAMLError):
            pass  # an earlier mutation left what cannot be parsed: only its bytes are left to change
    path.write_bytes(mutate_bytes(data, random))


def mutate_state(state: Any, random: Random) -> Any:
    """A trainer's state: its log more often than the rest."""
    if isinstance(state, dict) and isinstance(state.get("log_history"), list) and random.random() < 0.8:
        return state | {"log_history": mutate_rows(state["log_history"], random)}
    return mutate_tree(state, random)


def _jsonl(text: str, random: Random) -> str:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if rows and isinstance(rows[0], dict) and isinstance(rows[0].get("data"), dict) and random.random() < 0.7:
        inner = mutate_rows([row.get("data") for row in rows], random)
        rows = [{"step": number, "data": data} for number, data in enumerate(inner)]
    elif random.random() < 0.75:
        rows = mutate_rows(rows, random)
    else:
        rows = [mutate_tree(row, random) for row in rows]
    return "".join(_json(row) + "\n" for row in rows)


def _csv(text: str, random: Random) -> str:
    header, *lines = list(csv.reader(io.StringIO(text)))
    cells = mutate_rows([dict(zip(header, line, strict=False)) for line in lines], random)
    rows = [row for row in cells if isinstance(row, dict)]
    names = list(dict.fromkeys(name for row in rows for name in row)) or header
    if random.random() < 0.2:
        names = [random.choice([name, "", "Step", name.split(" - ")[-1], name.upper(), "reward"]) for name in names]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=random.choice([",", ",", ",", ";", "\t"]))
    writer.writerow(names)
    for row in rows:
        writer.writerow([str(row.get(name, "")) for name in names][: random.choice([None, None, None, 1, 3])])
    return out.getvalue()


def _console(text: str, random: Random) -> str:
    lines = text.splitlines()
    for _ in range(random.randint(1, 10)):
        at = random.randrange(len(lines))
        parts = lines[at].split(" - ")
        name = random.choice(parts).split(":")[0]
        parts[random.randrange(len(parts))] = f"{name}:{value(random)}"
        lines[at] = random.choice([" - ", " -", "-", " - - "]).join(parts)
    return "\n".join(lines)


def _json(tree: Any) -> str:
    return json.dumps(tree, default=str, ensure_ascii=False)


def as_lines(rows: list[Any]) -> bytes:
    """JSON lines of anything, lone surrogates included."""
    return "".join(_json(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def as_yaml(tree: Any) -> str:
    """YAML of anything but lone surrogates, which it cannot write."""
    return yaml.safe_dump(_plain(tree), allow_unicode=True, sort_keys=False)


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_plain(key): _plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    return tree.encode("utf-8", "replace").decode() if isinstance(tree, str) else tree
