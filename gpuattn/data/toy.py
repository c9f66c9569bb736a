"""The toy pairs: English phrases of five kinds and the one right German translation of each.

A word-for-word dictionary fails on it: numbers become one word with tens and ones exchanged,
*half past four* is *halb fünf*, verbs move to the end, articles and adjectives agree with gender,
case and number.
"""

from itertools import product

from gpuattn.data.grammar import Kind
from gpuattn.data.lexicon import (
    DETERMINERS,
    MONTH_DAYS,
    MONTHS_DE,
    MONTHS_EN,
    OF_PEOPLE,
    OF_THINGS,
    PEOPLE,
    THINGS,
    VERBS,
    WEEKDAYS,
    noun_phrase,
    number_de,
    number_en,
    ordinal_de,
    ordinal_en,
)

# Chosen by inspection of the byte-pair pieces: most words are one piece, and a German number is
# cut near its parts ("sieben undvier zigtausend acht hundert ..."), so that unseen ones are spelled
# from seen pieces. At 1,000 half of the nouns are in two or three pieces; from 1,600 on whole
# groups of figures are single pieces.
VOCAB_SIZE = 1400

# The None entries are phrases without an adjective.
ADJECTIVES_OF_PEOPLE = (None,) * 6 + OF_PEOPLE
ADJECTIVES_OF_THINGS = (None,) * 6 + OF_THINGS
ARTICLES = tuple(product(DETERMINERS, (False, True)))


def _words(*parts):
    return " ".join(filter(None, parts))


# ---- numbers: thousands x hundreds is the table, so whole ranges of a hundred are held out ----

# People try small numbers first: 17 % of the draws have up to three digits and 31 % have four.
_RANGES = tuple(
    cell
    for cell in product(range(100), range(10))
    for _ in range(30 if cell[0] == 0 else 6 if cell[0] < 10 else 1)
)


def _number(cell, rest):
    n = cell[0] * 1000 + cell[1] * 100 + rest
    return number_en(n), number_de(n)


# ---- dates: day x month ----

# {d} day, {m} month, {y} year or nothing. German ordinals are "dritte" plus an ending.
_DATES = (
    ("the {d} of {m}{y}", "der {d} {m}{y}"),
    ("on the {d} of {m}{y}", "am {d}n {m}{y}"),
    ("on {m} the {d}{y}", "am {d}n {m}{y}"),
    ("since the {d} of {m}{y}", "seit dem {d}n {m}{y}"),
    ("until the {d} of {m}{y}", "bis zum {d}n {m}{y}"),
    ("the letter of the {d} of {m}{y}", "der Brief vom {d}n {m}{y}"),
    ("today is the {d} of {m}{y}", "heute ist der {d} {m}{y}"),
    ("she was born on the {d} of {m}{y}", "sie wurde am {d}n {m}{y} geboren"),
    ("he came back on the {d} of {m}{y}", "er kam am {d}n {m}{y} zurück"),
    ("they left on the {d} of {m}{y}", "sie reisten am {d}n {m}{y} ab"),
    ("the party took place on the {d} of {m}{y}", "das Fest fand am {d}n {m}{y} statt"),
    ("we have been living here since the {d} of {m}{y}", "wir wohnen seit dem {d}n {m}{y} hier"),
    *(
        (f"on {en} the {{d}} of {{m}}{{y}}", f"am {de}, dem {{d}}n {{m}}{{y}}")
        for en, de in WEEKDAYS
    ),
)
_CALENDAR = tuple((day, month) for month in range(12) for day in range(1, MONTH_DAYS[month] + 1))
_YEARS = (None,) * 60 + tuple(range(11, 100))


def _date(cell, frame, year):
    day, month = cell
    english, german = frame
    en = f" nineteen {number_en(year)}" if year else ""
    de = f" neunzehnhundert{number_de(year)}" if year else ""
    return (
        english.format(d=ordinal_en(day), m=MONTHS_EN[month], y=en),
        german.format(d=ordinal_de(day), m=MONTHS_DE[month], y=de),
    )


# ---- times: minute x hour ----

# {h} the hour that English names, {next} the one after it.
_MINUTES = (
    ("{h} o'clock", "{h} Uhr"),
    ("five past {h}", "fünf nach {h}"),
    ("ten past {h}", "zehn nach {h}"),
    ("quarter past {h}", "Viertel nach {h}"),
    ("twenty past {h}", "zwanzig nach {h}"),
    ("twenty-five past {h}", "fünf vor halb {next}"),
    ("twenty-six past {h}", "vier vor halb {next}"),
    ("twenty-seven past {h}", "drei vor halb {next}"),
    ("twenty-eight past {h}", "zwei vor halb {next}"),
    ("half past {h}", "halb {next}"),
    ("twenty-eight to {h}", "zwei nach halb {h}"),
    ("twenty-seven to {h}", "drei nach halb {h}"),
    ("twenty-six to {h}", "vier nach halb {h}"),
    ("twenty-five to {h}", "fünf nach halb {h}"),
    ("twenty to {h}", "zwanzig vor {h}"),
    ("quarter to {h}", "Viertel vor {h}"),
    ("ten to {h}", "zehn vor {h}"),
    ("five to {h}", "fünf vor {h}"),
)
_DAYS = (
    ("", ""),
    ("today", "heute"),
    ("tomorrow", "morgen"),
    ("every day", "jeden Tag"),
    *((f"on {english}", f"am {german}") for english, german in WEEKDAYS),
)
# English, German before the time, German after it.
_EVENTS = (
    ("", "", ""),
    ("the train leaves", "der Zug fährt", "ab"),
    ("the bus arrives", "der Bus kommt", "an"),
    ("the film starts", "der Film fängt", "an"),
    ("the shop opens", "der Laden macht", "auf"),
    ("the shop closes", "der Laden macht", "zu"),
    ("I get up", "ich stehe", "auf"),
    ("we meet", "wir treffen uns", ""),
)
_OCCASIONS = (
    *((("{t}", "{t}"), ("it is {t}", "es ist {t}")) * 10),
    *(
        (_words(event, "at {t}", day), _words(before, tag, "um {t}", after))
        for (event, before, after), (day, tag) in product(_EVENTS, _DAYS)
    ),
)


def _time(cell, occasion):
    minute, hour = cell
    english, german = _MINUTES[minute]
    # "ein Uhr", but "halb eins".
    time = german.format(
        h=number_de(hour + 1, last=minute > 0), next=number_de((hour + 1) % 12 + 1)
    )
    return (
        occasion[0].format(t=english.format(h=number_en(hour + 1))),
        occasion[1].format(t=time),
    )


# ---- prices: euros x cents ----

# {x} the thing, {p} the price; German verb for one thing and for many; case of the thing.
_DEALS = (
    (("{x} costs {p}", "{x} cost {p}"), ("{x} kostet {p}", "{x} kosten {p}"), False),
    (("I paid {p} for {x}",) * 2, ("ich habe {p} für {x} bezahlt",) * 2, True),
    (("she spends {p} on {x}",) * 2, ("sie gibt {p} für {x} aus",) * 2, True),
    (("he sells {x} for {p}",) * 2, ("er verkauft {x} für {p}",) * 2, True),
)
_CURRENCIES = (("euros", "Euro"), ("dollars", "Dollar"), ("pounds", "Pfund"), ("francs", "Franken"))


def _price(cell, deal, article, adjective, noun, currency):
    whole, tens = cell
    determiner, plural = article
    english, german, accusative = deal
    thing, ding = noun_phrase(determiner, adjective, noun, plural, accusative)
    price = _words(number_en(whole), currency[0], number_en(10 * tens) if tens else "")
    preis = _words(number_de(whole), currency[1], number_de(10 * tens) if tens else "")
    return english[plural].format(x=thing, p=price), german[plural].format(x=ding, p=preis)


# ---- clauses: verb x object ----

_OPENINGS = (
    ("I think that", "ich glaube, dass"),
    ("she says that", "sie sagt, dass"),
    ("we know that", "wir wissen, dass"),
    ("you hear that", "du hörst, dass"),
    ("it is good that", "es ist gut, dass"),
    ("they ask whether", "sie fragen, ob"),
    ("he wonders whether", "er fragt sich, ob"),
    ("I am happy because", "ich freue mich, weil"),
)
# Tense or modal verb, and when.
_WHEN = (
    ("past", "yesterday", "gestern"),
    ("past", "last week", "letzte Woche"),
    ("past", "last year", "letztes Jahr"),
    ("past", "this morning", "heute Morgen"),
    ("present", "today", "heute"),
    ("present", "now", "jetzt"),
    ("present", "every day", "jeden Tag"),
    ("present", "this week", "diese Woche"),
    ("will", "tomorrow", "morgen"),
    ("will", "soon", "bald"),
    ("will", "next week", "nächste Woche"),
    ("will", "next year", "nächstes Jahr"),
    ("must", "today", "heute"),
    ("must", "tomorrow", "morgen"),
    ("can", "now", "jetzt"),
    ("can", "next week", "nächste Woche"),
)
_MODALS = {"will": ("wird", "werden"), "must": ("muss", "müssen"), "can": ("kann", "können")}


def _conjugate(verb, tense, plural):
    """Return (English, German) of the third person; the German words as at a clause's end."""
    if tense == "past":
        return verb.past, verb.einst_viele if plural else verb.einst
    if tense == "present":
        return (verb.base, verb.infinitive) if plural else (verb.third, verb.dritte)
    return f"{tense} {verb.base}", f"{verb.infinitive} {_MODALS[tense][plural]}"


def _clause(cell, opening, article, adjective, person, object_article, object_adjective, when):
    determiner, plural = article
    verb, thing = VERBS[cell[0]], THINGS[cell[1]]
    who, wer = noun_phrase(determiner, adjective, person, plural)
    what, was = noun_phrase(
        object_article[0], object_adjective, thing, object_article[1], accusative=True
    )
    does, tut = _conjugate(verb, when[0], plural)
    return (
        f"{opening[0]} {who} {does} {what} {when[1]}",
        f"{opening[1]} {wer} {when[2]} {was} {tut}",
    )


def _table(rows, columns):
    return tuple(product(range(rows), range(columns)))


KINDS = (
    Kind("numbers", 0.15, _RANGES, (tuple(range(100)),), _number),
    Kind("dates", 0.15, _CALENDAR, (_DATES, _YEARS), _date),
    Kind("times", 0.15, _table(len(_MINUTES), 12), (_OCCASIONS,), _time),
    Kind(
        "prices",
        0.15,
        tuple(product(range(2, 100), range(10))),
        (_DEALS, ARTICLES, ADJECTIVES_OF_THINGS, THINGS, _CURRENCIES),
        _price,
    ),
    Kind(
        "clauses",
        0.4,
        _table(len(VERBS), len(THINGS)),
        (
            _OPENINGS,
            ARTICLES,
            ADJECTIVES_OF_PEOPLE,
            PEOPLE,
            ARTICLES,
            ADJECTIVES_OF_THINGS,
            _WHEN,
        ),
        _clause,
    ),
)
