import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from h2okv.engine.chat import Transcript, TurnForm

TURNS = ("the cat sat", "and the dog?", "on the mat")
ANSWERS = ("on the log", "the dog sat on the mat", "so it did")
# Says at its very start how long the chat is, so that no rendering begins like the one before.
COUNTING = (
    "{{ messages | length }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
)
LAST_ONLY = "<|im_start|>{{ messages[-1].content }}<|im_end|>"


def talk(form, turns, ended=True):
    """Take turns and answers; return the transcript and the new tokens of each turn."""
    tokenizer, transcript, new = form.tokenizer, Transcript(), []
    for turn, answer in zip(turns, ANSWERS, strict=False):
        asked_turn = form.ask(transcript, turn)
        new.append(asked_turn.token_ids[len(transcript.token_ids) :])
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        text = answer
        if ended:
            ids, text = [*ids, tokenizer.eos_token_id], answer + tokenizer.eos_token
        transcript = asked_turn.then("assistant", answer, ids, text)
    return transcript, new


class TestTemplate:
    @pytest.mark.parametrize("ended", [True, False], ids=["ended by itself", "cut"])
    @pytest.mark.parametrize("system", ["", "be brief"])
    def test_all_turns_equal_the_template_of_the_whole_chat(self, chat_tokenizer, ended, system):
        tokenizer = chat_tokenizer()
        form = TurnForm(tokenizer, system)
        assert not form.is_plain
        before, _ = talk(form, TURNS[:2], ended)
        transcript = form.ask(before, TURNS[2])
        rendered = tokenizer.apply_chat_template(
            transcript.messages, add_generation_prompt=True, return_dict=False
        )
        assert transcript.token_ids == rendered
        assert transcript.text == tokenizer.decode(rendered)
        assert transcript.token_ids[: len(before.token_ids)] == before.token_ids

    def test_a_generated_end_token_is_not_repeated(self, chat_tokenizer):
        tokenizer = chat_tokenizer()
        _, new = talk(TurnForm(tokenizer), TURNS)
        end = tokenizer.eos_token_id
        assert [ids.count(end) for ids in new] == [1, 1, 1]
        _, new = talk(TurnForm(tokenizer), TURNS, ended=False)
        assert [ids.count(end) for ids in new] == [1, 2, 2]
        assert new[1][0] == end

    @pytest.mark.parametrize("ended", [True, False])
    def test_a_turn_is_rendered_alone_if_the_template_changes_earlier_messages(
        self, chat_tokenizer, ended
    ):
        _, stable = talk(TurnForm(chat_tokenizer()), TURNS, ended)
        _, changing = talk(TurnForm(chat_tokenizer(COUNTING)), TURNS, ended)
        assert changing[1:] == stable[1:]
        assert changing[0] == [*changing[0][:1], *stable[0]]

    def test_an_error_of_the_template_is_one_sentence(self, chat_tokenizer):
        form = TurnForm(chat_tokenizer(NO_SYSTEM), "be brief")
        with pytest.raises(ValueError, match=r"no system here\); leave out --system"):
            form.ask(Transcript(), "hello")

    def test_a_template_without_earlier_answers_is_refused(self, chat_tokenizer):
        form = TurnForm(chat_tokenizer(LAST_ONLY))
        with pytest.raises(ValueError, match="leaves earlier answers out"):
            talk(form, TURNS)

    def test_transcript_has_all_messages(self, chat_tokenizer):
        transcript, _ = talk(TurnForm(chat_tokenizer(), "be brief"), TURNS[:1])
        assert transcript.messages == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": TURNS[0]},
            {"role": "assistant", "content": ANSWERS[0]},
        ]


class TestPlain:
    def test_a_model_without_a_template_gets_a_dialogue(self, tokenizer):
        form = TurnForm(tokenizer, "a play")
        assert form.is_plain
        first = form.ask(Transcript(), "hello")
        assert tokenizer.decode(first.token_ids) == "a play\n\nUser: hello\n\nAssistant:"

    @pytest.mark.parametrize(
        "answer", [" a cat", " a cat\n", " a cat\n\n", " a cat\n\nUs", " a cat\n\nUser", " a cat U"]
    )
    def test_a_generated_start_of_the_user_line_is_not_repeated(self, tokenizer, answer):
        form = TurnForm(tokenizer)
        asked_turn = form.ask(Transcript(), "hello")
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        again = form.ask(asked_turn.then("assistant", answer, ids, answer), "more")
        content = answer.removesuffix("User").removesuffix("Us").rstrip("\n")
        expected = f"User: hello\n\nAssistant:{content}\n\nUser: more\n\nAssistant:"
        assert tokenizer.decode(again.token_ids) == expected

    def test_a_stop_string_after_one_newline_is_not_repeated(self, tokenizer):
        form = TurnForm(tokenizer)
        asked_turn = form.ask(Transcript(), "hello")
        ids = tokenizer(" a cat\nUser", add_special_tokens=False)["input_ids"]
        again = form.ask(asked_turn.then("assistant", "", ids, ""), "more")
        assert tokenizer.decode(again.token_ids).endswith("a cat\nUser: more\n\nAssistant:")

    def test_a_tokenizer_with_a_prefix_space_adds_none_between_turns(self):
        inner = Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>")
        inner.train_from_iterator(["User: hello more\n\nAssistant: a cat" * 4], trainer=trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
        form = TurnForm(tokenizer)
        asked_turn = form.ask(Transcript(), "hello")
        answer = tokenizer("a cat")["input_ids"]
        again = form.ask(asked_turn.then("assistant", "a cat", answer, " a cat"), "more")
        expected = "User: hello\n\nAssistant: a cat\n\nUser: more\n\nAssistant:"
        assert tokenizer.decode(again.token_ids) == expected
