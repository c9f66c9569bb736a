"""Generated tasks: correct German, seeded, disjoint splits, too hard for a dictionary."""

import datetime
import math
import re
from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
from count_calls import count_calls

from gpuattn.data import toy
from gpuattn.data.generated import GENERATED, generate
from gpuattn.data.grammar import DIAGONALS, TEST, VALID, split_of
from gpuattn.data.lexicon import noun_phrase, number_de, number_en, ordinal_de, ordinal_en
from gpuattn.errors import ConfigError, DataError

KIND = {kind.name: kind for kind in toy.KINDS}


def by_kind(pairs):
    found = defaultdict(list)
    for pair in pairs:
        found[pair.kind].append(pair)
    return found


# ---- numbers and ordinals ----


def read_english(words):
    """Return the value of an English number, read from left to right, to check number_en."""
    units = {number_en(n): n for n in range(100)}
    total = group = 0
    for word in words.replace(" and ", " ").split():
        if word == "hundred":
            group *= 100
        elif word == "thousand":
            total, group = total + 1000 * group, 0
        else:
            group += units[word]
    return total + group


def read_german(word):
    """Return the value of a German number, by splitting its word, to check number_de."""
    if "tausend" in word:
        head, rest = word.split("tausend")
        return 1000 * read_german(head) + (read_german(rest) if rest else 0)
    if "hundert" in word:
        head, rest = word.split("hundert")
        return 100 * read_german(head) + (read_german(rest) if rest else 0)
    stems = ["drei", "vier", "fünf", "sech", "sieb", "acht", "neun"]
    small = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    small += ["zehn", "elf", "zwölf", *(stem + "zehn" for stem in stems)]
    tens = dict(zip(["zwan", *stems], range(20, 100, 10), strict=True))
    match = re.fullmatch(r"(?:(\w+)und)?(\w+?)(?:zig|ßig)", word)
    if match:
        return tens[match[2]] + (read_german(match[1]) if match[1] else 0)
    return 1 if word == "ein" else small.index(word)


def test_numbers_read_back():
    numbers = [*range(2000), *range(2000, 1_000_000, 997), 999_999]
    assert [read_english(number_en(n)) for n in numbers] == numbers
    assert [read_german(number_de(n)) for n in numbers] == numbers


@pytest.mark.parametrize(
    ("n", "english", "german"),
    [
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred and one", "einhunderteins"),
        (4207, "four thousand two hundred and seven", "viertausendzweihundertsieben"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend"),
        (66_777, "sixty-six thousand seven hundred and seventy-seven",
         "sechsundsechzigtausendsiebenhundertsiebenundsiebzig"),
    ],
)  # fmt: skip
def test_numbers(n, english, german):
    assert number_en(n) == english
    assert number_de(n) == german


@pytest.mark.parametrize(
    ("n", "english", "german"),
    [
        (1, "first", "erste"),
        (2, "second", "zweite"),
        (3, "third", "dritte"),
        (5, "fifth", "fünfte"),
        (7, "seventh", "siebte"),
        (8, "eighth", "achte"),
        (12, "twelfth", "zwölfte"),
        (19, "nineteenth", "neunzehnte"),
        (20, "twentieth", "zwanzigste"),
        (23, "twenty-third", "dreiundzwanzigste"),
        (31, "thirty-first", "einunddreißigste"),
    ],
)
def test_ordinals(n, english, german):
    assert ordinal_en(n) == english
    assert ordinal_de(n) == german


# ---- known answers for each rule of the grammar ----


def translation(kind, source):
    """Return the target of a source, found by drawing from its kind."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        for split in ("train", "valid", "test"):
            for found, target in KIND[kind].draw(split, 4000, rng):
                if found == source:
                    return target
    raise AssertionError(f"{kind} did not generate {source!r}")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("half past four", "halb fünf"),
        ("half past twelve", "halb eins"),
        ("one o'clock", "ein Uhr"),
        ("it is quarter to one", "es ist Viertel vor eins"),
        ("twenty-five past eleven", "fünf vor halb zwölf"),
        ("twenty-five to eleven", "fünf nach halb elf"),
        ("the train leaves at ten past six today", "der Zug fährt heute um zehn nach sechs ab"),
        ("I get up at six o'clock on Monday", "ich stehe am Montag um sechs Uhr auf"),
        ("we meet at five to eight every day", "wir treffen uns jeden Tag um fünf vor acht"),
    ],
)  # fmt: skip
def test_times(source, target):
    assert translation("times", source) == target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("the third of March", "der dritte März"),
        ("on May the first", "am ersten Mai"),
        ("on Friday the twentieth of July", "am Freitag, dem zwanzigsten Juli"),
        ("she was born on the seventh of June", "sie wurde am siebten Juni geboren"),
    ],
)
def test_dates(source, target):
    assert translation("dates", source) == target


def clause(who, verb, what, tense, day):
    """Return the (English, German) clause with these words."""

    def find(words, adjectives, nouns):
        choices = product(toy.ARTICLES, (None, *adjectives), nouns)
        return next(c for c in choices if noun_phrase(c[0][0], c[1], c[2], c[0][1])[0] == words)

    object_article, object_adjective, thing = find(what, toy.OF_THINGS, toy.THINGS)
    cell = ([v.base for v in toy.VERBS].index(verb), toy.THINGS.index(thing))
    when = next(w for w in toy._WHEN if w[:2] == (tense, day))
    subject = find(who, toy.OF_PEOPLE, toy.PEOPLE)
    return toy._clause(cell, toy._OPENINGS[0], *subject, object_article, object_adjective, when)


@pytest.mark.parametrize(
    ("words", "source", "target"),
    [
        (
            ("the old man", "sell", "the red car", "past", "yesterday"),
            "I think that the old man sold the red car yesterday",
            "ich glaube, dass der alte Mann gestern das rote Auto verkaufte",
        ),
        (
            ("a young woman", "buy", "an expensive coat", "will", "soon"),
            "I think that a young woman will buy an expensive coat soon",
            "ich glaube, dass eine junge Frau bald einen teuren Mantel kaufen wird",
        ),
        (
            ("old aunts", "forget", "this lamp", "present", "now"),
            "I think that old aunts forget this lamp now",
            "ich glaube, dass alte Tanten jetzt diese Lampe vergessen",
        ),
        (
            ("my tired friend", "look for", "my small key", "must", "today"),
            "I think that my tired friend must look for my small key today",
            "ich glaube, dass mein müder Freund heute meinen kleinen Schlüssel suchen muss",
        ),
        (
            ("these tall children", "see", "new radios", "past", "last year"),
            "I think that these tall children saw new radios last year",
            "ich glaube, dass diese großen Kinder letztes Jahr neue Radios sahen",
        ),
        (
            ("an aunt", "take", "a heavy book", "present", "today"),
            "I think that an aunt takes a heavy book today",
            "ich glaube, dass eine Tante heute ein schweres Buch nimmt",
        ),
        (
            ("my aunts", "give away", "these green cups", "can", "next week"),
            "I think that my aunts can give away these green cups next week",
            "ich glaube, dass meine Tanten nächste Woche diese grünen Tassen verschenken können",
        ),
    ],
)
def test_clauses(words, source, target):
    assert clause(*words) == (source, target)


def test_prices():
    rings = {noun.one: noun for noun in toy.THINGS}
    the = (toy.DETERMINERS[0], False)
    costs, paid = toy._DEALS[:2]
    red = toy.OF_THINGS[0]
    assert toy._price((22, 5), costs, the, red, rings["coat"], toy._CURRENCIES[0]) == (
        "the red coat costs twenty-two euros fifty",
        "der rote Mantel kostet zweiundzwanzig Euro fünfzig",
    )
    assert toy._price((2, 0), paid, the, red, rings["coat"], toy._CURRENCIES[3]) == (
        "I paid two francs for the red coat",
        "ich habe zwei Franken für den roten Mantel bezahlt",
    )


# ---- properties of generate ----


@pytest.mark.parametrize("name", GENERATED)
def test_seeded(name):
    pairs = generate(name, "train", 300, 7)
    assert pairs == generate(name, "train", 300, 7)
    assert pairs != generate(name, "train", 300, 8)
    assert len(pairs) == 300
    assert {pair.kind for pair in pairs} == {kind.name for kind in GENERATED[name].kinds}
    assert all(pair.source == pair.source.strip() and pair.target for pair in pairs)


@pytest.mark.parametrize("name", GENERATED)
def test_splits_are_disjoint(name):
    parts = {
        split: {pair.source for pair in generate(name, split, count, 3)}
        for split, count in (("train", 60_000), ("valid", 5000), ("test", 5000))
    }
    assert not parts["train"] & parts["valid"]
    assert not parts["train"] & parts["test"]
    assert not parts["valid"] & parts["test"]


@pytest.mark.parametrize(
    "kind", [k for task in GENERATED.values() for k in task.kinds], ids=lambda k: k.name
)
def test_training_has_each_row_and_column_of_a_kind(kind):
    cells = defaultdict(set)
    for cell in kind.cells:
        cells[split_of(*cell)].add(cell)
    for axis in (0, 1):
        assert {cell[axis] for cell in kind.cells} == {cell[axis] for cell in cells["train"]}
    share = {split: len(found) / len(set(kind.cells)) for split, found in cells.items()}
    assert 0.03 < share["valid"] < 0.1
    assert 0.03 < share["test"] < 0.1


def test_numbers_held_out_are_whole_hundreds():
    held = {
        read_english(pair.source) // 100
        for pair in by_kind(generate("toy", "test", 2000, 0))["numbers"]
    }
    trained = by_kind(generate("toy", "train", 50_000, 0))["numbers"]
    assert len(held) > 30
    assert all((n // 10 + 3 * (n % 10)) % DIAGONALS == TEST for n in held)
    assert not held & {read_english(pair.source) // 100 for pair in trained}
    assert VALID != TEST


def test_one_answer_for_each_source():
    answers = {}
    for seed in range(2):
        for pair in generate("toy", "train", 60_000, seed):
            assert answers.setdefault(pair.source, pair.target) == pair.target


def distinct(kind, split=None):
    """Return how many different choices a grammar has, in one split or in all."""
    cells = {cell for cell in kind.cells if split in (None, split_of(*cell))}
    return len(cells) * math.prod(len(set(slot)) for slot in kind.slots)


def test_distinct_pairs_counted():
    """The product of the tables' sizes is the number of pairs: no two choices say the same."""
    total = sum(map(distinct, toy.KINDS))
    assert total >= 10**7
    of_splits = (
        distinct(kind, split) for kind in toy.KINDS for split in ("train", "valid", "test")
    )
    assert total == sum(of_splits)
    for name in ("numbers", "times"):
        kind = KIND[name]
        (slot,) = kind.slots
        rendered = {kind.render(cell, value) for cell in set(kind.cells) for value in set(slot)}
        assert len({source for source, _ in rendered}) == len(rendered) == distinct(kind)
    rng = np.random.default_rng(0)
    for name in ("dates", "prices", "clauses"):
        kind = KIND[name]
        sets = [list(dict.fromkeys(values)) for values in (kind.cells, *kind.slots)]
        choices = {tuple(int(rng.integers(len(s))) for s in sets) for _ in range(20_000)}
        rendered = {
            kind.render(*(s[i] for s, i in zip(sets, choice, strict=True))) for choice in choices
        }
        assert len({source for source, _ in rendered}) == len(choices)


def test_lengths_and_shares_of_kinds():
    found = by_kind(generate("toy", "train", 20_000, 0))
    assert np.mean([len(pair.target.split()) for pair in found["clauses"]]) >= 8
    assert max(len(pair.source.split()) for pairs in found.values() for pair in pairs) <= 15
    shares = {kind: len(pairs) / 20_000 for kind, pairs in found.items()}
    assert shares == {kind.name: pytest.approx(kind.share, abs=0.02) for kind in toy.KINDS}
    assert sum(kind.share for kind in toy.KINDS) == pytest.approx(1)


def test_pairs_take_few_calls_each():
    generate("toy", "train", 100, 0)
    assert count_calls(lambda: generate("toy", "train", 20_000, 0)) < 15 * 20_000


def dictionary(pairs, rounds=4):
    """Return the most frequent translation (zero or more target words) of each source word.

    Words are aligned by IBM Model 1 (Brown et al., Computational Linguistics 1993).
    """
    sentences = [(["", *pair.source.split()], pair.target.split()) for pair in pairs]
    chance = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in sentences:
            for word in target:
                weights = [chance[s, word] for s in source]
                total = sum(weights)
                for s, weight in zip(source, weights, strict=True):
                    counts[s, word] += weight / total
                    totals[s] += weight / total
        chance = {pair: count / totals[pair[0]] for pair, count in counts.items()}
    votes = defaultdict(Counter)
    for source, target in sentences:
        aligned = [[] for _ in source]
        for word in target:
            aligned[int(np.argmax([chance[s, word] for s in source]))].append(word)
        for s, words in zip(source, aligned, strict=True):
            votes[s][" ".join(words)] += 1
    return {s: count.most_common(1)[0][0] for s, count in votes.items()}


def test_a_word_for_word_dictionary_is_not_enough():
    lexicon = dictionary(generate("toy", "train", 4000, 0))
    pairs = generate("toy", "test", 2000, 0)
    unknown = {word for pair in pairs for word in pair.source.split()} - set(lexicon)
    assert not unknown
    right = Counter()
    for pair in pairs:
        words = [lexicon[word] for word in pair.source.split()]
        right[pair.kind] += " ".join(filter(None, words)) == pair.target
    score = sum(right.values()) / len(pairs)
    print(f"word-for-word dictionary on the toy test set: {score:.1%} exact, {dict(right)}")
    assert 0 < score <= 0.2


# ---- the other tasks ----


def test_dates_are_iso():
    months = {datetime.date(2000, m, 1).strftime("%b"): m for m in range(1, 13)}
    for source, target, _ in generate("dates", "train", 3000, 0):
        date = datetime.date.fromisoformat(target)
        assert str(date.year) in source
        found = [m for name, m in months.items() if name in source]
        assert not found or found == [date.month]
        for day in re.findall(r"(\w+day),", source):
            assert day == date.strftime("%A")


def test_reverse():
    for source, target, _ in generate("reverse", "train", 500, 0):
        assert source.split() == target.split()[::-1]
        assert 4 <= len(source.split()) <= 12


def test_errors():
    with pytest.raises(ConfigError, match="'revers'.*toy, dates, reverse.*Did you mean 'reverse'"):
        generate("revers", "train", 1, 0)
    with pytest.raises(ConfigError, match="'dev'.*train, valid, test"):
        generate("toy", "dev", 1, 0)
    with pytest.raises(DataError, match="-1"):
        generate("toy", "train", -1, 0)
    assert generate("toy", "train", 0, 0) == []
