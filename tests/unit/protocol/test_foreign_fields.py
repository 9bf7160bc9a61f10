import pytest

from octavo.errors import InvalidInput
from octavo.protocol.foreign_fields import ELSEWHERE, NOT_BUILT, RENAMED
from octavo.protocol.sampling_params import SamplingParams


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_field_whose_feature_is_missing_is_refused_with_the_way_out_unless_it_asks_for_nothing(name):
    neutral, way_out = NOT_BUILT[name]
    for value in (None, *neutral):
        assert SamplingParams(temperature=0.5, **{name: value}) == SamplingParams(temperature=0.5)
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**{name: {"any": "thing"}})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert message.endswith(f"is not built yet; {way_out}")


def test_a_neutral_value_has_its_type():
    for fields in ({"use_beam_search": 0}, {"best_of": True}, {"mirostat": False}):
        with pytest.raises(InvalidInput):
            SamplingParams(**fields)


@pytest.mark.parametrize("name", RENAMED)
def test_a_field_with_another_name_is_a_type_error_that_says_it(name):
    with pytest.raises(TypeError, match=f"'{name}' is no field of SamplingParams; it is {RENAMED[name]} here"):
        SamplingParams(**{name: 1})
    assert RENAMED[name] in SamplingParams.__struct_fields__


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_field_with_another_place_is_a_type_error_that_says_where(name):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})
    assert str(caught.value).endswith(ELSEWHERE[name])


def test_no_field_of_our_own_is_called_foreign():
    assert not {*NOT_BUILT, *RENAMED, *ELSEWHERE} & set(SamplingParams.__struct_fields__)
