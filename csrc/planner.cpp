// The planner's inner loops behind a plain C ABI, for src/gradwire/sim/native.py: no torch, no Python. Everything here has a
// Python twin that gives the same result; times are femtoseconds, programs are named by the number that gw_add gave.

#include <memory>
#include <new>

#include "planner_fusion.hpp"
#include "planner_offload.hpp"

// The C++ library has this function since GCC 11 only. Ours takes its place, so that one wheel loads with older ones too.
namespace std {
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std

namespace {

using namespace gradwire_planner;

std::vector<const Program*> named(const Line& line, const std::int32_t* numbers, int count) {
  std::vector<const Program*> programs(count);
  for (int i = 0; i < count; i++) programs[i] = numbers[i] < 0 ? nullptr : line.programs[numbers[i]].get();
  return programs;
}

void copy_exchanges(const Alone& alone, Time* begins, Time* ends) {
  std::copy(alone.step.begins.begin(), alone.step.begins.end(), begins);
  std::copy(alone.step.ends.begin(), alone.step.ends.end(), ends);
}

// What the calls say instead of a step.
constexpr Time kAboveLimit = -1, kTooLong = -2, kNoMemory = -3;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// after: when each gradient would be ready if there were nothing but computation, the forward's end first.
void* gw_line(const Time* after, std::int32_t parts, std::int32_t workers) {
  auto line = std::make_unique<Line>();
  line->after.assign(after, after + parts);
  line->workers = workers;
  return line.release();
}

void gw_free(void* line) { delete static_cast<Line*>(line); }

// tasks: (resource, length, urgency, phase) of each. The program's number.
std::int32_t gw_add(void* handle, const Time* tasks, std::int32_t count, std::int32_t codecs) {
  Line& line = *static_cast<Line*>(handle);
  auto program = std::make_unique<Program>();
  for (int i = 0; i < count; i++) {
    const Time* task = tasks + 4 * i;
    program->add({task[1], static_cast<int>(task[0]), static_cast<int>(task[2]), static_cast<int>(task[3])});
  }
  program->tasks.push_back({0, DONE, 0, 0});
  program->codecs = codecs;
  line.programs.push_back(std::move(program));
  return static_cast<std::int32_t>(line.programs.size()) - 1;
}

// One step, kAboveLimit, or kTooLong for what whole numbers of 64 bits cannot add up.
Time gw_step(void* handle, const std::int32_t* programs, const std::int32_t* releases, std::int32_t count, std::int32_t skew,
             Time limit) {
  const Line& line = *static_cast<const Line*>(handle);
  const auto own = named(line, programs, count);
  double sum = 0;
  for (const Program* program : own) sum += static_cast<double>(program->chain);
  if (!line.fits(sum)) return kTooLong;
  Buckets buckets({releases, releases + count}, skew);
  for (int bucket = 0; bucket < count; bucket++) buckets.set(bucket, own[bucket]);
  Step step(line);
  std::vector<State> none;
  return step.run<false>(buckets, limit, none, 0) ? step.length : kAboveLimit;
}

// tables: `options` programs for each tensor, filled up with -1. order: of the visits. chosen, begins, ends: by tensor.
// counts: candidates, simulated, ruled out.
Time gw_select(void* handle, const std::int32_t* tables, std::int32_t tensors, std::int32_t options, const std::int32_t* sizes,
               const std::int32_t* order, std::int32_t visits, std::int32_t skew, std::int32_t prune, std::int32_t looks,
               std::int32_t* chosen, Time* begins, Time* ends, Time* counts) try {
  const Line& line = *static_cast<const Line*>(handle);
  std::vector<std::vector<const Program*>> rows(tensors);
  for (int tensor = 0; tensor < tensors; tensor++) {
    rows[tensor] = named(line, tables + static_cast<std::ptrdiff_t>(tensor) * options, options);
    while (rows[tensor].back() == nullptr) rows[tensor].pop_back();
  }
  Selection selection(line, std::move(rows), {sizes, sizes + tensors}, skew, prune != 0, looks);
  if (!selection.run({order, order + visits})) return kTooLong;
  std::copy(selection.chosen.begin(), selection.chosen.end(), chosen);
  copy_exchanges(selection.alone(), begins, ends);
  counts[0] = selection.candidates;
  counts[1] = selection.alone().simulated;
  counts[2] = selection.ruled_out;
  return selection.alone().best;
} catch (const std::bad_alloc&) {
  return kNoMemory;  // no exception may leave a C function
}

// moved: -1 where a tensor stays. members: of all groups one after the other, ends[g] behind the last one of group g.
// counts: offloaded of each group.
Time gw_offload(void* handle, const std::int32_t* programs, const std::int32_t* moved, std::int32_t tensors,
                const std::int32_t* members, const std::int32_t* group_ends, std::int32_t groups, std::int32_t skew,
                std::int32_t exhaustive, std::int32_t* counts, Time* begins, Time* ends, Time* simulated) try {
  const Line& line = *static_cast<const Line*>(handle);
  std::vector<std::vector<int>> grouped(groups);
  for (int group = 0; group < groups; group++)
    grouped[group].assign(members + (group ? group_ends[group - 1] : 0), members + group_ends[group]);
  const auto here = named(line, programs, tensors), there = named(line, moved, tensors);
  double sum = 0;
  for (int tensor = 0; tensor < tensors; tensor++)
    sum += static_cast<double>(std::max(here[tensor]->chain, there[tensor] ? there[tensor]->chain : 0));
  if (!line.fits(sum)) return kTooLong;
  Offload offload(line, here, there, std::move(grouped), skew);
  if (exhaustive) {
    offload.exhaust();
  } else {
    offload.descend();
  }
  std::copy(offload.counts.begin(), offload.counts.end(), counts);
  copy_exchanges(offload.alone, begins, ends);
  *simulated = offload.alone.simulated;
  return offload.alone.best;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

// ready, sent: tensors + 1 values each. decode: by tensor. boundaries: room for one by tensor. Their number.
std::int32_t gw_fuse(const double* ready, const double* sent, std::int32_t tensors, double first, double second,
                     std::int32_t mirrored, const double* decode, std::int32_t* boundaries) {
  const std::vector<int> found = Fusion(ready, sent, tensors, first, second, mirrored != 0, decode).search();
  std::copy(found.begin(), found.end(), boundaries);
  return static_cast<std::int32_t>(found.size());
}

}  // extern "C"
#pragma GCC visibility pop
