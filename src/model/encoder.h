// The crammed encoder (recipe: Geiping & Goldstein, ICML 2023) with an explicit backward pass, whole or cut into
// pipeline blocks: the trunk that every objective stands on. It moves nothing between stages.
//
// No autograd: gradients go straight into the flat buffers of the parameter store, and bf16 weights can have fp32
// gradients. Legend: B rows, S tokens a row, N = B*S, H hidden, M picked rows, t tensor ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "model/attention.h"
#include "model/dropout.h"
#include "model/embedding.h"
#include "model/ffn.h"
#include "model/stage_split.h"

namespace cram {

/// One micro-batch as the trunk sees it. The first stage uses its ids; all use its rows, and its lengths where it has
/// them.
struct MicroBatch {
  Batch fields;
  at::Tensor picks;  ///< [M] rows b*S+s of the last hidden states that are wanted; undefined: all. Of the last stage
  DropoutSource dropout;
};

/// True when training computes the last layer, from its queries on, for the picked rows only: nothing else of its
/// output is used, and only keys and values are needed of all rows. With several tensor ranks, whose exchanges have
/// fixed sizes, or with dropout, whose counters are rows, it is computed whole. The numbers are the same.
[[nodiscard]] bool last_layer_is_sparse(const ModelConfig& config, int tensor_ranks);

/// Pre-norm layer: x += dropout(attn(norm1(x))); x += dropout(ffn(norm2(x))).
class EncoderLayer {
 public:
  struct Saved {
    at::Tensor input;  // [N or N/t,H]; the only one kept when the layer is computed again
    LayerNorm::Saved norm1, norm2;
    SelfAttention::Saved attention;
    GatedFfn::Saved ffn;
  };

  EncoderLayer(std::int64_t index, const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor);
  /// x [N or N/t,H] -> the same shape; where `picks_rows`, training (`saved` given) gives the picked rows [M,H].
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const MicroBatch& batch, Saved* saved) const;
  /// dy as forward gave -> dx [N or N/t,H].
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const MicroBatch& batch, const Saved& saved) const;
  /// True when training computes this layer for the picked rows of the micro-batch only.
  [[nodiscard]] bool picks_rows(const MicroBatch& batch) const { return is_sparse_ && batch.picks.defined(); }

 private:
  /// `picks` [M]: the rows that are wanted; undefined: all.
  [[nodiscard]] at::Tensor compute(const at::Tensor& x, const MicroBatch& batch, const at::Tensor& picks,
                                   Saved* saved) const;
  std::int64_t index_;
  bool recompute_, is_sparse_;
  TensorRegion tensor_;
  LayerNorm norm1_;
  SelfAttention attention_;
  LayerNorm norm2_;
  GatedFfn ffn_;
};

/// Where a rank's part of the model is: its tensor group, its stage, and the ranges of all blocks, block b on stage
/// b % stages.
struct Placement {
  TensorRegion tensor;
  int stage = 0;
  int stages = 1;
  std::vector<BlockRange> blocks = {};  ///< empty: one block, everything
};

class Encoder {
 public:
  /// Registers the parameters of this rank's blocks with the store, which the caller allocates and fills afterwards.
  /// Methods are collective over the tensor group. Store and group must outlive the encoder. Throws Error(kUsage) with
  /// the legal sizes when the group cannot share the model.
  Encoder(const ModelConfig& config, ParameterStore& store, const Placement& placement);

  struct BlockSaved {
    Embedding::Saved embedding;
    std::vector<EncoderLayer::Saved> layers;
    LayerNorm::Saved final_norm;
    std::int64_t rows = 0;  // N, before rows were picked
  };
  /// Called when the gradients of a run of parameters [first, end) of this micro-batch are complete.
  using GradientsComplete = std::function<void(ParamId first, ParamId end)>;

  /// Block b of this rank: x [N or N/t,H] from the block before (undefined for block 0) -> activation [N or N/t,H]; the
  /// last block's are the final hidden states, normalised: the picked rows [M,H], or all [N,H], on every tensor rank.
  /// `saved` is filled for training; nullptr: no backward pass follows.
  [[nodiscard]] at::Tensor forward_block(int block, const MicroBatch& batch, const at::Tensor& x, BlockSaved* saved);
  /// dy as forward gave: adds to the store's gradients and returns the gradient of the block's input, undefined for
  /// block 0. Frees what `saved` holds as it goes. `complete` may be empty.
  [[nodiscard]] at::Tensor backward_block(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                                          const GradientsComplete& complete);
  /// Shape [rows,H] of an activation between blocks for a micro-batch of B x S.
  [[nodiscard]] at::Tensor make_activation(std::int64_t batch, std::int64_t seq) const;
  [[nodiscard]] int blocks() const { return static_cast<int>(ranges_.size()); }
  [[nodiscard]] const std::vector<BlockRange>& ranges() const { return ranges_; }
  [[nodiscard]] const Placement& place() const { return place_; }
  [[nodiscard]] bool has_last_block() const { return final_norm_.has_value(); }
  /// This rank's rows of the tied word embedding; on the first and the last stage.
  [[nodiscard]] ParamId word_embedding() const { return word_embedding_; }

  [[nodiscard]] const ModelConfig& config() const { return config_; }

 private:
  struct ParamRange {
    ParamId first = 0, end = 0;
  };
  struct Part {
    int block = 0;
    std::vector<std::unique_ptr<EncoderLayer>> layers;
    std::vector<ParamRange> layer_params;
  };
  [[nodiscard]] Part& part_of(int block);

  ModelConfig config_;
  const ParameterStore& store_;
  Placement place_;
  std::vector<BlockRange> ranges_;
  ParamId word_embedding_ = 0;
  std::optional<Embedding> embedding_;
  std::optional<LayerNorm> final_norm_;
  ParamRange embedding_params_, final_norm_params_;
  std::vector<Part> parts_;
};

}  // namespace cram
