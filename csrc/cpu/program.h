// A forward pass as a list of native calls, so that a step costs one call from Python and not one an operator.
//
// Functions bound with `define` can be traced: while a thread has a trace, each call of one is noted with its operands.
// What to make of a trace is decided in octavo/ops/cpu/recording.py; a Program runs the result.
#pragma once

#include <nanobind/nanobind.h>

#include <bit>
#include <cstdint>
#include <deque>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

namespace octavo {

using Word = int64_t;  // an operand as a program keeps it: integers and addresses as they are, doubles by their bits
using Operand = std::variant<int64_t, double, std::string>;  // the same for Python
using Call = std::tuple<std::string, std::vector<Operand>>;
using Thunk = void (*)(const Word*);

// The calls of this thread since begin_trace, or null.
std::vector<Call>* current_trace();
void register_thunk(const char* name, Thunk thunk, size_t num_operands);

template <class A>
A from_word(Word word) {
    if constexpr (std::is_reference_v<A>) return *reinterpret_cast<std::remove_reference_t<A>*>(word);
    else if constexpr (std::is_floating_point_v<A>) return A(std::bit_cast<double>(word));
    else if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(word);
    else return A(word);
}

template <class A>
Operand to_operand(const A& value) {
    if constexpr (std::is_floating_point_v<A>) return double(value);
    else if constexpr (std::is_same_v<A, const char*>) return std::string(value);
    else if constexpr (std::is_class_v<A>) return int64_t(reinterpret_cast<uintptr_t>(&value));
    else return int64_t(value);
}

template <auto function, class... A, size_t... I>
void call_with_words(const Word* words, std::index_sequence<I...>) {
    function(from_word<A>(words[I])...);
}

template <auto function, class... A>
void define_as(nanobind::module_& module, const char* name, void (*)(A...)) {
    register_thunk(
        name, [](const Word* words) { call_with_words<function, A...>(words, std::index_sequence_for<A...>()); },
        sizeof...(A));
    module.def(name, [name](A... args) {
        if (auto* trace = current_trace()) trace->push_back({name, {to_operand(args)...}});
        function(args...);
    });
}

// Binds a function without a result that computes for a step. Its operands: integers, addresses, floating point
// numbers, strings, and references to objects that outlive the call.
template <auto function>
void define(nanobind::module_& module, const char* name) {
    define_as<function>(module, name, function);
}

class Program {
   public:
    // Appends a call. Each patch (operand, slot, factor, offset) says that an operand is the value of a slot of `run`,
    // times the factor, plus the offset. Throws std::invalid_argument if there is no such function, operand or slot.
    void add(const std::string& name, const std::vector<Operand>& operands,
             const std::vector<std::tuple<size_t, size_t, int64_t, int64_t>>& patches);
    // All calls in order. Throws what a call throws, and std::invalid_argument if a slot that is used is not given.
    void run(const std::vector<int64_t>& slots) const;

   private:
    struct Patch {
        uint32_t operand, slot;
        int64_t factor, offset;
    };
    struct Step {
        Thunk thunk;
        size_t words_begin, words_end, patches_end;
    };
    std::vector<Step> steps_;
    std::vector<Word> words_;
    std::vector<Patch> patches_;
    std::deque<std::string> strings_;  // their characters stay where they are
    size_t num_slots_ = 0;
};

}  // namespace octavo
