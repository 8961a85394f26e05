// Borders of tensor-parallel regions: each direction is the transpose of the other, and layers between them are the
// dense ones.
#include "parallel/regions.h"

#include "model/linear.h"
#include "model/stage_split.h"
#include "parallel/communicator_suite.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

constexpr std::int64_t kRows = 12, kWidth = 5;

// Whole numbers, so that every sum is exact.
at::Tensor integers(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randint(-9, 10, shape, at::detail::createCPUGenerator(seed), at::kDouble);
}

double scalar_product(const at::Tensor& a, const at::Tensor& b) { return (a * b).sum().item<double>(); }

double sum_over(Communicator& group, double value) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  group.all_reduce_(sum);
  return sum.item<double>();
}

void expect_all_good(const std::vector<std::string>& messages) {
  for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << "rank " << r;
}

// <Ax, y> = <x, A'y>, both inner products over all ranks' parts. A value that is whole on every rank is one vector, not
// t: its inner product counts once.
TEST(Regions, EveryOperatorIsTheTransposeOfItsBackward) {
  for (const int size : {1, 2, 3, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      expect_all_good(run_ranks(size, [&](Communicator& group) {
        const TensorRegion region(group, sequence_parallel);
        const auto seed = static_cast<std::uint64_t>(group.rank());
        const std::int64_t held = region.rows_held(kRows);
        // Outside of the region: whole (equal on all ranks) or this rank's rows.
        const at::Tensor x =
            region.sequence_parallel() ? integers({held, kWidth}, 10 + seed) : integers({kRows, kWidth}, 10);
        const at::Tensor y = integers({kRows, kWidth}, 20 + seed);  // inside: every rank its own
        const double copies = region.sequence_parallel() ? 1 : size;
        const double forward = sum_over(group, scalar_product(region.enter(x), y));
        const double backward = sum_over(group, scalar_product(x, region.enter_backward_(y.clone()).wait())) / copies;
        require(forward == backward, "enter: " + std::to_string(forward) + " against " + std::to_string(backward));
        const double out = sum_over(group, scalar_product(region.leave_(y.clone()), x)) / copies;
        const double in = sum_over(group, scalar_product(y, region.leave_backward(x)));
        require(out == in, "leave: " + std::to_string(out) + " against " + std::to_string(in));
        require(at::equal(region.own_rows(region.gather_rows(x)), x), "own rows of the gathered rows");
      }));
    }
  }
}

// A column layer followed by a row layer, cut over the ranks, against the two dense ones.
TEST(Regions, LayersBetweenThemAreTheDenseOnes) {
  constexpr std::int64_t kInner = 24;
  const at::Tensor x = integers({kRows, kWidth}, 1), dy = integers({kRows, kWidth}, 2);
  for (const std::int64_t groups : {1, 2}) {
    ParameterStore dense;
    const auto up =
        make_linear("dense", LinearStyle::kReplicated, {"up", kWidth, kInner, 1.0, groups}, dense, self_group());
    const auto down =
        make_linear("dense", LinearStyle::kReplicated, {"down", kInner, kWidth, 1.0}, dense, self_group());
    dense.allocate(Precision::kFp64, at::kCPU, test::adam_states());
    dense.initialize(3);
    Linear::Saved up_saved, down_saved;
    const at::Tensor expected = down->forward(up->forward(x, &up_saved), &down_saved);
    const at::Tensor expected_dx = up->backward(down->backward(dy, down_saved), up_saved);
    for (const int size : {2, 3, 4}) {
      for (const bool sequence_parallel : {false, true}) {
        expect_all_good(run_ranks(size, [&](Communicator& group) {
          const TensorRegion region(group, sequence_parallel);
          ParameterStore store;
          const auto column =
              make_linear("dense", LinearStyle::kColumn, {"up", kWidth, kInner, 1.0, groups}, store, region);
          const auto row = make_linear("dense", LinearStyle::kRow, {"down", kInner, kWidth, 1.0}, store, region);
          store.allocate(Precision::kFp64, at::kCPU, test::adam_states());
          store.initialize(3);
          Linear::Saved column_saved, row_saved;
          const at::Tensor columns = column->forward(region.own_rows(x), &column_saved);
          // With two groups a rank has a part of both halves; the row layer cuts its input in one piece, so put it back
          // in that order by gathering what all ranks have.
          if (groups == 2) {
            const at::Tensor all = at::empty({size, kRows, kInner / size}, at::kDouble);
            group.all_gather(all, columns.contiguous());
            const at::Tensor halves = all.view({size, kRows, 2, kInner / size / 2});
            const at::Tensor whole = halves.permute({1, 2, 0, 3}).reshape({kRows, kInner});
            require(relative_error(whole, at::mm(x, up->materialize().t())) < 1e-14, "halves");
            return;
          }
          const at::Tensor out = row->forward(columns, &row_saved);
          require(relative_error(out, region.own_rows(expected)) < 1e-13, "output");
          const at::Tensor dx = column->backward(row->backward(region.own_rows(dy), row_saved), column_saved);
          require(relative_error(dx, region.own_rows(expected_dx)) < 1e-13, "input gradient");
          for (ParamId id = 0; id < store.size(); ++id) {
            const at::Tensor whole = dense.grad(dense.find(store.spec(id).name));
            require(relative_error(store.grad(id), take_slice(whole, store.spec(id))) < 1e-13, store.spec(id).name);
          }
        }));
      }
    }
  }
}

TEST(Regions, RowsThatCannotBeSharedOutAreRefused) {
  for (const std::string& message : run_ranks(3, [](Communicator& group) {
         (void)TensorRegion(group, true).leave_(at::ones({10, 2}));
       })) {
    EXPECT_NE(message.find("10 rows"), std::string::npos) << message;
    EXPECT_NE(message.find("3 tensor ranks"), std::string::npos) << message;
  }
}

// ---- layers to pipeline blocks

// The rule of decisions.md by brute force: the largest cost, then the sum of squared layers, then earlier blocks more.
std::vector<std::int64_t> best_split(std::int64_t layers, std::int64_t blocks) {
  std::vector<std::int64_t> best, current;
  std::pair<std::int64_t, std::int64_t> best_score{1 << 20, 0};
  const std::function<void(std::int64_t)> choose = [&](std::int64_t left) {
    const auto remaining = blocks - static_cast<std::int64_t>(current.size());
    if (remaining == 0) {
      if (left != 0) return;
      std::int64_t largest = current.back() + 1, squares = 0;
      for (const std::int64_t size : current) {
        largest = std::max(largest, size);
        squares += size * size;
      }
      const std::pair score{largest, squares};
      if (score < best_score || (score == best_score && current > best)) {
        best_score = score;
        best = current;
      }
      return;
    }
    for (std::int64_t size = 1; size <= left - (remaining - 1); ++size) {
      current.push_back(size);
      choose(left - size);
      current.pop_back();
    }
  };
  choose(layers);
  return best;
}

TEST(StageSplit, IsTheBestOfAllSplits) {
  for (std::int64_t blocks = 1; blocks <= 5; ++blocks) {
    for (std::int64_t layers = blocks; layers <= 14; ++layers) {
      std::vector<std::int64_t> sizes;
      std::int64_t next = 0;
      for (const BlockRange& range : split_layers(layers, blocks, "")) {
        EXPECT_EQ(range.first_layer, next);
        EXPECT_EQ(range.embedding, next == 0);
        next = range.end_layer;
        EXPECT_EQ(range.head, next == layers);
        sizes.push_back(range.layers());
      }
      EXPECT_EQ(sizes, best_split(layers, blocks)) << layers << " layers, " << blocks << " blocks";
    }
  }
  const std::vector<BlockRange> thirty = split_layers(30, 4, "");
  EXPECT_EQ(thirty[1].text(), "layers 8-15");
  EXPECT_EQ(thirty[3].layers(), 7);
}

TEST(StageSplit, RefusesWhatDoesNotFitAndSaysWhat) {
  EXPECT_EQ(split_layers(30, 4, "8,8,8,6")[3].layers(), 6);
  expect_error(ExitCode::kUsage, {"model.layers=3", "4 pipeline blocks", "1 to 3"},
               [] { (void)split_layers(3, 4, ""); });
  expect_error(ExitCode::kUsage, {"8,8", "2 blocks with 16 layers", "expected 4 with 30"},
               [] { (void)split_layers(30, 4, "8,8"); });
  expect_error(ExitCode::kUsage, {"at least one layer"}, [] { (void)split_layers(4, 2, "4,0"); });
  expect_error(ExitCode::kUsage, {"parallel.split"}, [] { (void)split_layers(4, 2, "2,x"); });
}

}  // namespace
}  // namespace cram::test
