// ByteComp's Algorithm 2: the same as src/gradwire/planner/offload.py, with the same result.
#pragma once

#include "planner_select.hpp"

namespace gradwire_planner {

class Offload {
 public:
  // programs: by tensor, codecs on GPUs. moved: the same with codecs on CPUs, nullptr where that is not allowed.
  // members: tensors of each group, ascending.
  Offload(const Line& line, std::vector<const Program*> programs, std::vector<const Program*> moved,
          std::vector<std::vector<int>> members, int skew)
      : alone(line, static_cast<int>(programs.size()), skew), programs_(std::move(programs)), moved_(std::move(moved)),
        members_(std::move(members)), counts(members_.size(), 0) {
    for (int tensor = 0; tensor < alone.count(); tensor++) alone.buckets.set(tensor, programs_[tensor]);
    alone.simulated = 1;
    alone.record(0);
  }

  // All products of counts, the last group's changing fastest.
  void exhaust() {
    std::vector<int> tried(members_.size(), 0);
    for (;;) {
      int group = static_cast<int>(members_.size()) - 1;
      while (group >= 0 && tried[group] == static_cast<int>(members_[group].size())) tried[group--] = 0;
      if (group < 0) return;
      tried[group]++;
      try_counts(tried);
    }
  }

  // Groups in turn, each over all its counts, until none changes.
  void descend() {
    for (bool improved = true; improved;) {
      improved = false;
      for (std::size_t group = 0; group < members_.size(); group++)
        for (int count = 0; count <= static_cast<int>(members_[group].size()); count++) {
          std::vector<int> tried = counts;
          tried[group] = count;
          improved = try_counts(tried) || improved;
        }
    }
  }

  Alone alone;

 private:
  std::vector<const Program*> programs_, moved_;
  std::vector<std::vector<int>> members_;

 public:
  std::vector<int> counts;  // offloaded, of each group

 private:
  // Take these counts if they make the step shorter; what is before the first tensor that differs is known.
  bool try_counts(const std::vector<int>& tried) {
    const auto [differs, last] = move(tried, counts);
    if (last < 0) return false;
    const Known known = {alone.best, last + 1};
    const Time step = alone.try_it(alone.best - 1, alone.first_of(differs), &known);
    if (step < 0) {
      move(counts, tried);
      return false;
    }
    counts = tried;
    alone.record(differs);
    return true;
  }

  // Gives tensors the programs of these counts instead of those; the first and the last tensor that change, or -1.
  std::pair<int, int> move(const std::vector<int>& to, const std::vector<int>& from) {
    int first = -1, last = -1;
    for (std::size_t group = 0; group < members_.size(); group++)
      for (int place = std::min(to[group], from[group]); place < std::max(to[group], from[group]); place++) {
        const int tensor = members_[group][place];
        alone.buckets.set(tensor, place < to[group] ? moved_[tensor] : programs_[tensor]);
        first = first < 0 ? tensor : std::min(first, tensor);
        last = std::max(last, tensor);
      }
    return {first, last};
  }
};

}  // namespace gradwire_planner
