// The exact search for the best fusion: the same as src/gradwire/planner/fusion.py, with the same result to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace gradwire_planner {

// Plans whose steps differ by less than this factor have the same step but for rounding errors.
constexpr double kRounding = 1 - 1e-12;

class Fusion {
 public:
  // ready, sent: tensors + 1 values each. decode: of the last bucket, by its first tensor.
  Fusion(const double* ready, const double* sent, int tensors, double first, double second, bool mirrored, const double* decode)
      : ready_(ready), sent_(sent), tensors_(tensors), first_(first), second_(second), mirrored_(mirrored), decode_(decode) {}

  // Boundaries of the plan with the shortest step and an exposed decode.
  std::vector<int> search() const {
    std::vector<int> best;
    double best_us = kInfinite;
    struct Range {
      int first, last;  // start of the last bucket
      double least;
    };
    std::vector<Range> ranges = {{0, tensors_ - 1, 0.0}};
    while (!ranges.empty()) {
      const auto [first, last, least] = ranges.back();
      ranges.pop_back();
      if (first > last) continue;
      const double below = best_us * kRounding - decode_[last];
      if (least >= below) continue;
      const int middle = best.empty() ? first : (first + last) / 2;
      const auto [plan, plan_us] = shortest(middle, least, below);
      ranges.push_back({first, middle - 1, least});
      if (plan.empty()) continue;
      const int start = plan.size() > 1 ? plan[plan.size() - 2] : 0;
      if (plan_us + decode_[start] < best_us) best = plan, best_us = plan_us + decode_[start];
      ranges.push_back({start + 1, last, plan_us});
    }
    return best;
  }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  struct Walk {
    std::vector<int> ends;  // empty where there would be too many, or where the walk stands still
    double lag, turn;
  };

  const double *ready_, *sent_;
  int tensors_;
  double first_, second_;
  bool mirrored_;
  const double* decode_;

  // Buckets that reach as far as the bound allows: at most `most`, the last from `last_start` or later.
  Walk walk(int last_start, double bound, double most) const {
    Walk made = {{}, -kInfinite, kInfinite};
    std::vector<int>& ends = made.ends;
    int end = 0;
    while (static_cast<double>(ends.size()) < most) {
      const double slack = static_cast<double>(ends.size() + 1) * (second_ - first_) + sent_[end];
      int reach = static_cast<int>(std::lower_bound(ready_ + end, ready_ + tensors_ + 1, bound + slack) - ready_) - 1;
      if (reach < tensors_) made.turn = std::min(made.turn, ready_[reach + 1] - slack);
      if (mirrored_ && ends.empty()) reach = std::min(reach, tensors_ - last_start);
      if (reach >= tensors_ && (mirrored_ || end >= last_start)) {
        ends.push_back(tensors_);
        made.lag = std::max(made.lag, ready_[tensors_] - slack);
        return made;
      }
      reach = std::min(reach, tensors_ - 1);
      if (reach <= end) break;
      made.lag = std::max(made.lag, ready_[reach] - slack);
      ends.push_back(reach);
      end = reach;
    }
    ends.clear();
    return made;
  }

  // Boundaries and length of the plan with the shortest step, without the decode; none where no plan is shorter than `below`. No
  // plan is shorter than `least`.
  std::pair<std::vector<int>, double> shortest(int last_start, double least, double below) const {
    const double constant = second_, fixed = sent_[tensors_] + constant;
    std::vector<int> best;
    double best_us = below;
    using Interval = std::tuple<double, double, double, int>;  // no step in it is shorter, low, high, fewest buckets
    std::vector<Interval> intervals;
    const auto push = [&](Interval interval) {
      intervals.push_back(interval);
      std::push_heap(intervals.begin(), intervals.end(), std::greater<>());
    };
    const double lowest = ready_[1] + first_ - second_;
    push({lowest + constant + fixed, lowest, kInfinite, 1});
    while (!intervals.empty()) {
      std::pop_heap(intervals.begin(), intervals.end(), std::greater<>());
      auto [floor, low, high, fewest] = intervals.back();
      intervals.pop_back();
      if (std::max(floor, least) >= best_us * kRounding) break;
      high = std::min(high, best_us - fewest * constant - fixed);
      const double bound = (low + high) / 2;
      if (!(low < bound && bound <= high)) continue;
      const double most = constant != 0 ? std::min<double>(tensors_, (best_us - fixed - low) / constant) : tensors_;
      const Walk walked = walk(last_start, bound, most);
      if (!walked.ends.empty()) {
        const int count = static_cast<int>(walked.ends.size());
        const double others = count * constant + fixed;
        if (walked.lag + others < best_us) best = walked.ends, best_us = walked.lag + others;
        push({low + others, low, std::min(bound, walked.lag), count});
      }
      const double turn = std::max(walked.turn, bound);
      if (turn < high) push({turn + fewest * constant + fixed, turn, high, fewest});
    }
    return {best.empty() ? best : boundaries(best), best_us};
  }

  // In gradient-ready order.
  std::vector<int> boundaries(std::vector<int> ends) const {
    if (!mirrored_) return ends;
    std::vector<int> found;
    for (std::size_t at = ends.size() - 1; at > 0; at--) found.push_back(tensors_ - ends[at - 1]);
    found.push_back(tensors_);
    return found;
  }
};

}  // namespace gradwire_planner
