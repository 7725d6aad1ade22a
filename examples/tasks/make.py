"""Write three small tasks as prompts and completions, from templates and a seed.

    python examples/tasks/make.py -o /tmp/tasks

gives sql, data and dialogue folders with train.jsonl and test.jsonl. They mirror the
tasks of the Speculative Streaming paper: text to SQL, data to text, and dialogue to
summary. No prompt of a test file is in its training file, and what a test asks about
(tables, restaurants, people) is partly never trained on.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import click

Example = tuple[str, str]
"""A prompt and its completion."""

TABLES = (
    "employees", "products", "books", "flights", "students", "cars", "movies", "orders",
    "boats", "rooms", "games", "lamps", "parts", "tickets", "animals",
    "plants", "shops", "trains", "phones", "teams", "songs", "hotels", "cameras",
    "bridges", "patients",
)  # fmt: skip
HELD_TABLES = TABLES[-5:]
NUMBERS = (
    "salary", "age", "price", "stock", "weight", "year", "pages", "hours", "grade",
    "score", "rating", "length", "total", "height", "width", "speed", "power", "depth",
)  # fmt: skip
NAMES = (
    "name", "city", "team", "title", "color", "author", "origin", "school", "model",
    "brand", "client", "day", "artist", "genre", "owner", "state", "maker", "street",
)  # fmt: skip
WORDS = ("Paris", "Rome", "red", "blue", "Smith", "Kim", "Berlin", "green", "Lopez")
COMPARISONS = (("above", ">"), ("below", "<"), ("at least", ">="), ("at most", "<="))
TOTALS = (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM"))

FIRST = (
    "Al", "Bar", "Cor", "Dan", "El", "Fer", "Gar", "Hol", "In", "Jas", "Kel", "Lor",
    "Mar", "Nor", "Ol", "Per", "Ros", "Sal", "Tor", "Val", "Wil", "Yar",
)  # fmt: skip
SECOND = (
    "a", "ben", "co", "den", "er", "fin", "gan", "ia", "is", "ka", "lin", "man", "mor",
    "na", "on", "ri", "sen", "ta", "ton", "us", "vin", "wick",
)  # fmt: skip
FOODS = ("Italian", "French", "Chinese", "Indian", "Japanese", "English", "fast")
PRICES = ("cheap", "moderately priced", "expensive")
AREAS = ("riverside", "city centre", "old town", "harbour")
SORTS = ("restaurant", "pub", "coffee shop")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
VENUES = ("the library", "the station", "the park", "the cinema", "the old bridge")
DEEDS = ("have lunch", "play chess", "study", "watch a film", "go for a walk")
THINGS = ("the tickets", "a cake", "the books", "some water", "the camera")
REASONS = ("is ill", "has to work", "missed the train", "has no time", "is tired")


def name(pick: random.Random, held: bool) -> str:
    """Of a place or a person; a fifth of all are never trained on."""
    one, two = pick.randrange(len(FIRST)), pick.randrange(len(SECOND))
    while ((one + two) % 5 == 0) != held:
        two = pick.randrange(len(SECOND))
    return FIRST[one] + SECOND[two]


def sql(pick: random.Random, held: bool) -> Example:
    """A question about one table, and its query."""
    table = pick.choice(HELD_TABLES if held else TABLES[: -len(HELD_TABLES)])
    columns = pick.sample(NUMBERS, 2) + pick.sample(NAMES, 3)
    pick.shuffle(columns)
    first, second, order = pick.sample(columns, 3)
    text, condition = _condition(pick, second)
    head = f"-- table {table}({', '.join(columns)})\n-- question: "
    kind = pick.randrange(4)
    if kind == 0:
        asked = f"What is the {first} of each of the {table} whose {text}?"
        query = f"SELECT {first} FROM {table} WHERE {condition};"
    elif kind == 1:
        asked = f"Give {first} and {second} of all {table}, ordered by {order}."
        query = f"SELECT {first}, {second} FROM {table} ORDER BY {order};"
    elif kind == 2:
        asked = f"How many {table} are there whose {text}?"
        query = f"SELECT COUNT(*) FROM {table} WHERE {condition};"
    else:
        number = pick.choice([c for c in columns if c in NUMBERS])
        word, function = pick.choice(TOTALS)
        asked = f"What is the {word} {number} of the {table} for each {first}?"
        query = f"SELECT {first}, {function}({number}) FROM {table} GROUP BY {first};"
    return f"{head}{asked}\n", query


def _condition(pick: random.Random, column: str) -> tuple[str, str]:
    """In words and in SQL."""
    if column in NUMBERS:
        word, sign = pick.choice(COMPARISONS)
        value = pick.randrange(1, 100) * pick.choice((1, 10, 100))
        return f"{column} is {word} {value}", f"{column} {sign} {value}"
    word = pick.choice(WORDS)
    return f"{column} is {word}", f"{column} = '{word}'"


def data(pick: random.Random, held: bool) -> Example:
    """The attributes of a place, and a sentence or two about it."""
    place, near = name(pick, held), name(pick, held)
    place = pick.choice(("The ", "")) + place
    sort, food, price, area = map(pick.choice, (SORTS, FOODS, PRICES, AREAS))
    rating, family = pick.randrange(1, 6), pick.choice((True, False))
    given = [f"name[{place}]", f"type[{sort}]", f"food[{food}]"]
    text = f"{place} is a {sort} that serves {food} food"
    if pick.random() < 0.7:
        given.append(f"price[{price}]")
        text += f" and is {price}"
    text += "."
    if pick.random() < 0.7:
        given.append(f"area[{area}]")
        text += f" It is located in the {area} area"
        if pick.random() < 0.6:
            given.append(f"near[{near}]")
            text += f", close to {near}"
        text += "."
    if pick.random() < 0.6:
        given.append(f"rating[{rating}]")
        text += f" Customers rate it {rating} out of 5."
    if pick.random() < 0.6:
        given.append(f"family[{'yes' if family else 'no'}]")
        text += " It is " + ("" if family else "not ") + "suitable for families."
    return f"{' '.join(given)}\n", text


def dialogue(pick: random.Random, held: bool) -> Example:
    """Two people arrange something, and what came of it."""
    one = two = name(pick, held)
    while two == one:
        two = name(pick, held)
    day, venue, deed = map(pick.choice, (DAYS, VENUES, DEEDS))
    hour, thing = pick.randrange(1, 12), pick.choice(THINGS)
    reason = pick.choice(REASONS)
    lines = [
        pick.choice((f"Hi {two}, how are you?", f"Hello {two}!", f"{two}, listen.")),
        pick.choice(("Fine, what is it?", "Hi, tell me.", f"Good to hear you, {one}.")),
        pick.choice(
            (
                f"Shall we {deed} on {day}?",
                f"Would you like to {deed} with me on {day}?",
                f"I want to {deed} on {day}. Will you come?",
            )
        ),
    ]
    kind = pick.randrange(3)
    if kind == 0:
        lines += ["Sure! Where and when?", f"At {hour}, at {venue}.", "See you there."]
        summary = f"{one} and {two} will {deed} at {venue} on {day} at {hour}."
    elif kind == 1:
        lines += [f"Sorry, I can't, my sister {reason}.", "What a pity. Another time!"]
        summary = (
            f"{one} wants to {deed} on {day}, but {two} can't come because "
            f"{two}'s sister {reason}."
        )
    else:
        lines += [f"Gladly. I will bring {thing}.", f"Great, let's meet at {venue}."]
        summary = (
            f"{one} and {two} will {deed} on {day}. They meet at {venue} and {two} "
            f"will bring {thing}."
        )
    spoken = (f"{(one, two)[i % 2]}: {line}\n" for i, line in enumerate(lines))
    return "".join(spoken) + "Summary:\n", summary


TASKS: dict[str, Callable[[random.Random, bool], Example]] = {
    "sql": sql,
    "data": data,
    "dialogue": dialogue,
}


def split(task: str, count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and a tenth as many to test with, half of them held."""
    pick, make = random.Random(f"{task} {seed}"), TASKS[task]
    test: dict[str, str] = {}
    while len(test) < count // 10:
        test.update([make(pick, len(test) % 2 == 0)])
    train: dict[str, str] = {}
    while len(train) < count:
        prompt, completion = make(pick, False)
        if prompt not in test:
            train[prompt] = completion
    return list(train.items()), list(test.items())


def write(file: Path, examples: list[Example]) -> None:
    """One JSON object a line."""
    lines = (json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in examples)
    file.write_text("".join(lines), encoding="utf-8")


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=4000, show_default=True, help="Examples per task.")
@click.option("--seed", default=1, show_default=True)
def main(output: Path, count: int, seed: int) -> None:
    """Write all tasks."""
    for task in TASKS:
        folder = output / task
        folder.mkdir(parents=True, exist_ok=True)
        train, test = split(task, count, seed)
        write(folder / "train.jsonl", train)
        write(folder / "test.jsonl", test)
        click.echo(f"{task}: {len(train)} to train on, {len(test)} to test with")


if __name__ == "__main__":
    main()
