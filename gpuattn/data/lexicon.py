"""English and German words of the toy grammar: numbers, noun phrases, verbs, the calendar."""

from functools import cache
from typing import Any, NamedTuple


def _split(words):
    return tuple(words.split())


ONES_EN = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
)
ONES_DE = _split(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn"
    " sechzehn siebzehn achtzehn neunzehn"
)
TENS_EN = _split("- - twenty thirty forty fifty sixty seventy eighty ninety")
TENS_DE = _split("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
ORDINALS_EN = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
    "twenty": "twentieth",
    "thirty": "thirtieth",
}
ORDINALS_DE = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}

MONTHS_EN = _split(
    "January February March April May June July August September October November December"
)
MONTHS_DE = _split(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEEKDAYS = (
    ("Monday", "Montag"),
    ("Tuesday", "Dienstag"),
    ("Wednesday", "Mittwoch"),
    ("Thursday", "Donnerstag"),
    ("Friday", "Freitag"),
    ("Saturday", "Samstag"),
    ("Sunday", "Sonntag"),
)


@cache
def number_en(n: int) -> str:
    """British number words of 0 <= n < 1,000,000: ``four thousand two hundred and seven``."""
    if n < 20:
        return ONES_EN[n]
    if n < 100:
        return TENS_EN[n // 10] + (f"-{ONES_EN[n % 10]}" if n % 10 else "")
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    head, rest = divmod(n, unit)
    joint = " and " if 0 < rest < 100 else " " if rest else ""
    return f"{number_en(head)} {name}{joint}{number_en(rest) if rest else ''}"


@cache
def number_de(n: int, last: bool = True) -> str:
    """German number word of 0 <= n < 1,000,000: ``viertausendzweihundertsieben``.

    ``last=False`` gives the form before another part of the word: ``ein`` for 1, not ``eins``.
    """
    if n < 20:
        return "ein" if n == 1 and not last else ONES_DE[n]
    if n < 100:
        ones = f"{number_de(n % 10, last=False)}und" if n % 10 else ""
        return ones + TENS_DE[n // 10]
    unit, name = (100, "hundert") if n < 1000 else (1000, "tausend")
    head, rest = divmod(n, unit)
    return number_de(head, last=False) + name + (number_de(rest, last) if rest else "")


def ordinal_en(n: int) -> str:
    """English ordinal word of 1 <= n < 100: ``twenty-third``."""
    head, dash, last = number_en(n).rpartition("-")
    return head + dash + ORDINALS_EN.get(last, f"{last}th")


def ordinal_de(n: int) -> str:
    """German ordinal word of 1 <= n < 100, as after ``der``: ``dreiundzwanzigste``."""
    return ORDINALS_DE.get(n) or number_de(n) + ("te" if n < 20 else "ste")


class Noun(NamedTuple):
    """``gender`` is the column of ``Determiner``: 0 masculine, 2 feminine, 3 neuter."""

    one: str
    many: str
    gender: int
    eins: str
    viele: str


class Determiner(NamedTuple):
    """German forms and the adjective endings they ask for.

    Columns: masculine nominative, masculine accusative, feminine, neuter, plural. Only the
    masculine singular tells its accusative from its nominative.
    """

    one: str
    many: str
    forms: tuple[str, ...]
    endings: tuple[str, ...]


class Verb(NamedTuple):
    """A transitive verb; the German infinitive is also the third person plural."""

    base: str
    third: str
    past: str
    infinitive: str
    dritte: str
    einst: str
    einst_viele: str


DETERMINERS = (
    Determiner("the", "the", ("der", "den", "die", "das", "die"), ("e", "en", "e", "e", "en")),
    Determiner("a", "", ("ein", "einen", "eine", "ein", ""), ("er", "en", "e", "es", "e")),
    Determiner(
        "my", "my", ("mein", "meinen", "meine", "mein", "meine"), ("er", "en", "e", "es", "en")
    ),
    Determiner(
        "this",
        "these",
        ("dieser", "diesen", "diese", "dieses", "diese"),
        ("e", "en", "e", "e", "en"),
    ),
)

PEOPLE = (
    Noun("man", "men", 0, "Mann", "Männer"),
    Noun("woman", "women", 2, "Frau", "Frauen"),
    Noun("child", "children", 3, "Kind", "Kinder"),
    Noun("teacher", "teachers", 0, "Lehrer", "Lehrer"),
    Noun("girl", "girls", 3, "Mädchen", "Mädchen"),
    Noun("boy", "boys", 0, "Junge", "Jungen"),
    Noun("doctor", "doctors", 0, "Arzt", "Ärzte"),
    Noun("sister", "sisters", 2, "Schwester", "Schwestern"),
    Noun("brother", "brothers", 0, "Bruder", "Brüder"),
    Noun("aunt", "aunts", 2, "Tante", "Tanten"),
    Noun("queen", "queens", 2, "Königin", "Königinnen"),
    Noun("friend", "friends", 0, "Freund", "Freunde"),
)

THINGS = (
    Noun("coat", "coats", 0, "Mantel", "Mäntel"),
    Noun("lamp", "lamps", 2, "Lampe", "Lampen"),
    Noun("car", "cars", 3, "Auto", "Autos"),
    Noun("table", "tables", 0, "Tisch", "Tische"),
    Noun("bag", "bags", 2, "Tasche", "Taschen"),
    Noun("book", "books", 3, "Buch", "Bücher"),
    Noun("letter", "letters", 0, "Brief", "Briefe"),
    Noun("clock", "clocks", 2, "Uhr", "Uhren"),
    Noun("bicycle", "bicycles", 3, "Fahrrad", "Fahrräder"),
    Noun("chair", "chairs", 0, "Stuhl", "Stühle"),
    Noun("bottle", "bottles", 2, "Flasche", "Flaschen"),
    Noun("picture", "pictures", 3, "Bild", "Bilder"),
    Noun("key", "keys", 0, "Schlüssel", "Schlüssel"),
    Noun("box", "boxes", 2, "Kiste", "Kisten"),
    Noun("shirt", "shirts", 3, "Hemd", "Hemden"),
    Noun("hat", "hats", 0, "Hut", "Hüte"),
    Noun("map", "maps", 2, "Karte", "Karten"),
    Noun("knife", "knives", 3, "Messer", "Messer"),
    Noun("ring", "rings", 0, "Ring", "Ringe"),
    Noun("guitar", "guitars", 2, "Gitarre", "Gitarren"),
    Noun("boat", "boats", 3, "Boot", "Boote"),
    Noun("ball", "balls", 0, "Ball", "Bälle"),
    Noun("cup", "cups", 2, "Tasse", "Tassen"),
    Noun("radio", "radios", 3, "Radio", "Radios"),
)

# English adjective, German stem before its ending.
OF_PEOPLE = (
    ("old", "alt"),
    ("young", "jung"),
    ("small", "klein"),
    ("tall", "groß"),
    ("friendly", "freundlich"),
    ("tired", "müd"),
    ("rich", "reich"),
    ("clever", "klug"),
)
OF_THINGS = (
    ("red", "rot"),
    ("blue", "blau"),
    ("green", "grün"),
    ("black", "schwarz"),
    ("old", "alt"),
    ("new", "neu"),
    ("small", "klein"),
    ("big", "groß"),
    ("beautiful", "schön"),
    ("cheap", "billig"),
    ("expensive", "teur"),
    ("heavy", "schwer"),
)

VERBS = (
    Verb("buy", "buys", "bought", "kaufen", "kauft", "kaufte", "kauften"),
    Verb("sell", "sells", "sold", "verkaufen", "verkauft", "verkaufte", "verkauften"),
    Verb("find", "finds", "found", "finden", "findet", "fand", "fanden"),
    Verb("lose", "loses", "lost", "verlieren", "verliert", "verlor", "verloren"),
    Verb("see", "sees", "saw", "sehen", "sieht", "sah", "sahen"),
    Verb("bring", "brings", "brought", "bringen", "bringt", "brachte", "brachten"),
    Verb("need", "needs", "needed", "brauchen", "braucht", "brauchte", "brauchten"),
    Verb("forget", "forgets", "forgot", "vergessen", "vergisst", "vergaß", "vergaßen"),
    Verb("look for", "looks for", "looked for", "suchen", "sucht", "suchte", "suchten"),
    Verb("steal", "steals", "stole", "stehlen", "stiehlt", "stahl", "stahlen"),
    Verb("hide", "hides", "hid", "verstecken", "versteckt", "versteckte", "versteckten"),
    Verb("draw", "draws", "drew", "zeichnen", "zeichnet", "zeichnete", "zeichneten"),
    Verb("take", "takes", "took", "nehmen", "nimmt", "nahm", "nahmen"),
    Verb("fetch", "fetches", "fetched", "holen", "holt", "holte", "holten"),
    Verb("receive", "receives", "received", "bekommen", "bekommt", "bekam", "bekamen"),
    Verb(
        "give away",
        "gives away",
        "gave away",
        "verschenken",
        "verschenkt",
        "verschenkte",
        "verschenkten",
    ),
)


@cache
def noun_phrase(
    determiner: Any, adjective: Any, noun: Any, plural: bool, accusative: bool = False
) -> tuple[str, str]:
    """Return (English, German) of, say, *this old lamp*: the German words agree in gender,
    number and case. ``adjective`` is (English, German stem) or None."""
    column = 4 if plural else noun.gender + (accusative and noun.gender == 0)
    english, stem = adjective or ("", "")
    german = stem + determiner.endings[column] if stem else ""
    thing, ding = (noun.many, noun.viele) if plural else (noun.one, noun.eins)
    article = determiner.many if plural else determiner.one
    if article == "a" and (english or thing)[0] in "aeiou":
        article = "an"
    return (
        " ".join(filter(None, (article, english, thing))),
        " ".join(filter(None, (determiner.forms[column], german, ding))),
    )
