#include "program.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <unordered_map>

#include "binding.h"

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr size_t kMaxOperands = 32;

struct Function {
    Thunk thunk;
    size_t num_operands;
};

std::unordered_map<std::string, Function>& functions() {
    static auto* all = new std::unordered_map<std::string, Function>;
    return *all;
}

thread_local std::unique_ptr<std::vector<Call>> trace;

}  // namespace

std::vector<Call>* current_trace() { return trace.get(); }

void register_thunk(const char* name, Thunk thunk, size_t num_operands) {
    functions()[name] = {thunk, num_operands};
}

void Program::add(const std::string& name, const std::vector<Operand>& operands,
                  const std::vector<std::tuple<size_t, size_t, int64_t, int64_t>>& patches) {
    auto found = functions().find(name);
    if (found == functions().end() || found->second.num_operands != operands.size() || operands.size() > kMaxOperands)
        throw std::invalid_argument("a program has no function " + name + " of " + std::to_string(operands.size()));
    for (const auto& [operand, slot, factor, offset] : patches) {
        if (operand >= operands.size() || !std::holds_alternative<int64_t>(operands[operand]) || slot > 1'000'000)
            throw std::invalid_argument("operand " + std::to_string(operand) + " of " + name + " takes no patch");
        patches_.push_back({uint32_t(operand), uint32_t(slot), factor, offset});
        num_slots_ = std::max(num_slots_, slot + 1);
    }
    size_t begin = words_.size();
    for (const Operand& operand : operands) {
        if (auto* integer = std::get_if<int64_t>(&operand)) words_.push_back(*integer);
        else if (auto* number = std::get_if<double>(&operand)) words_.push_back(std::bit_cast<Word>(*number));
        else words_.push_back(reinterpret_cast<Word>(strings_.emplace_back(std::get<std::string>(operand)).c_str()));
    }
    steps_.push_back({found->second.thunk, begin, words_.size(), patches_.size()});
}

void Program::run(const std::vector<int64_t>& slots) const {
    if (slots.size() < num_slots_)
        throw std::invalid_argument("the program needs " + std::to_string(num_slots_) + " slots, not " +
                                    std::to_string(slots.size()));
    nb::gil_scoped_release release;
    size_t patch = 0;
    for (const Step& step : steps_) {
        Word words[kMaxOperands];
        std::copy(words_.begin() + step.words_begin, words_.begin() + step.words_end, words);
        for (; patch < step.patches_end; ++patch) {
            const Patch& p = patches_[patch];
            words[p.operand] = slots[p.slot] * p.factor + p.offset;
        }
        step.thunk(words);
    }
}

void bind_program(nb::module_& module) {
    module.def("begin_trace", [] { trace = std::make_unique<std::vector<Call>>(); },
               "From now on this thread's calls that compute for a step are noted.");
    module.def(
        "end_trace",
        [] {
            std::unique_ptr<std::vector<Call>> ended = std::move(trace);
            return ended ? std::move(*ended) : std::vector<Call>();
        },
        "The calls noted since begin_trace: (name, operands) each.");
    nb::class_<Program>(module, "Program", "Native calls that run in one, with slots for what differs from run to run.")
        .def(nb::init<>())
        .def("add", &Program::add, nb::arg("name"), nb::arg("operands"), nb::arg("patches"))
        .def("run", &Program::run, nb::arg("slots"));
}

}  // namespace octavo
