import pytest

from octavo.entrypoints.server.json_words import in_json_words


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("echo=True must be True or False", "echo=true must be true or false"),
        ("stop=[None, 'None'] must be", "stop=[null, 'None'] must be"),
        ("x='a str' is a str; it must be a list of dicts", "x='a str' is a text; it must be a list of objects"),
        ("the model's templates: None, the user's None", "the model's templates: null, the user's null"),
        ("""x="it's None" and 'say "True"' and None""", """x="it's None" and 'say "True"' and null"""),
        (r"x='it\'s None' or None", r"x='it\'s None' or null"),
        ("Nonesuch, Trueness and a dictate", "Nonesuch, Trueness and a dictate"),
        ("", ""),
    ],
)
def test_pythons_words_become_those_of_json_outside_quotes(message, said):
    assert in_json_words(message) == said
