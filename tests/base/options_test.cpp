#include "base/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

using test::expect_error;
using test::TemporaryFolder;

struct Settings {
  double lr = 1e-3;
  std::int64_t layers = 16;
  bool shuffle = false;
  std::string schedule = "triangle2";
  std::string output = "runs/a";
  Quantity budget{24, "h"};
  Quantity stop{0, "steps"};
};

// One row of every kind.
struct Fixture {
  Settings s;
  OptionTable table;
  Fixture() {
    table.add("train.lr", &s.lr, "peak learning rate").range(0, 10).also_called({"learning_rate"});
    table.add("train.schedule", &s.schedule, "shape").choices({"triangle2", "cosine", "constant"});
    table.add("train.budget", &s.budget, "length").units({"steps", "tokens", "time"}).also_called({"max_steps"});
    table.add("model.layers", &s.layers, "layers").range(1, 1000).also_called({"num_layers", "depth"});
    table.add("data.shuffle", &s.shuffle, "permute");
    table.add("run.output", &s.output, "folder").free_on_resume();
    table.add("run.stop_after", &s.stop, "stop").units({"steps"});
  }
  void load(const std::string& content) {
    const TemporaryFolder folder;
    std::ofstream(folder / "c.toml", std::ios::binary) << content;
    table.load_toml_file(folder / "c.toml");
  }
};

TEST(Numbers, ParseStrictly) {
  EXPECT_EQ(parse_double("1e-3", "x"), 1e-3);
  EXPECT_EQ(parse_double("-0.5", "x"), -0.5);
  EXPECT_EQ(parse_double("1_000.5", "x"), 1000.5);
  EXPECT_EQ(parse_integer("900_000", "x"), 900'000);
  EXPECT_EQ(parse_integer("3e9", "x"), 3'000'000'000);
  EXPECT_EQ(parse_integer("-7", "x"), -7);
  EXPECT_EQ(parse_integer("9223372036854775807", "x"), std::numeric_limits<std::int64_t>::max());
  for (const char* text : {"",       " ",   "1,5", "1e-3x", "x1",   " 1",        "1 ",   "+1",  "1e400",
                           "-1e400", "nan", "inf", "-inf",  "NaN",  "infinity",  "0x10", "1e",  "1.2.3",
                           "--1",    "_1",  "1_",  "1__0",  "\xff", "1\xc3\xa9", "1\n",  "1e5_"}) {
    expect_error(
        ExitCode::kUsage, {"the key"}, [&] { (void)parse_double(text, "the key"); }, text);
    expect_error(
        ExitCode::kUsage, {"the key"}, [&] { (void)parse_integer(text, "the key"); }, text);
    expect_error(
        ExitCode::kUsage, {"the key"}, [&] { (void)parse_quantity(concat(text, "h"), "the key"); }, text);
  }
  for (const char* text : {"1.5", "1e-3", "1e300", "9223372036854775808"}) {
    expect_error(
        ExitCode::kUsage, {"whole number"}, [&] { (void)parse_integer(text, "x"); }, text);
  }
  expect_error(ExitCode::kUsage, {}, [] { (void)parse_double(std::string_view("1\0", 2), "x"); });
}

TEST(Numbers, FormatRoundTrips) {
  for (const double value :
       {0.0, -0.0, 0.1, 1.0 / 3, 1e-3, 3e9, 5e-324, 1.7976931348623157e308, 123456789.123456789, 1e22}) {
    EXPECT_EQ(parse_double(format_double(value), "x"), value);
    EXPECT_EQ(std::strtod(format_double17(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(format_double(1e-3), "0.001");
  EXPECT_EQ(format_double17(std::nan("")), "null");
  EXPECT_EQ(format_double17(std::numeric_limits<double>::infinity()), "null");
}

TEST(Quantities, ParseWithUnits) {
  EXPECT_EQ(parse_quantity("24h", "x"), (Quantity{24, "h"}));
  EXPECT_EQ(parse_quantity("5000steps", "x"), (Quantity{5000, "steps"}));
  EXPECT_EQ(parse_quantity("1step", "x"), (Quantity{1, "steps"}));
  EXPECT_EQ(parse_quantity("3e9tokens", "x"), (Quantity{3e9, "tokens"}));
  EXPECT_EQ(parse_quantity("0.5d", "x").seconds(), 43200);
  EXPECT_EQ(parse_quantity("90s", "x").seconds(), 90);
  EXPECT_EQ(parse_quantity("2m", "x").seconds(), 120);
  EXPECT_EQ(parse_quantity("2h", "x").seconds(), 7200);
  EXPECT_TRUE(parse_quantity("2h", "x").is_time());
  EXPECT_FALSE(parse_quantity("2rows", "x").is_time());
  for (const char* text :
       {"24", "24 h", "h", "24hours", "24H", "-1h", "24h ", "1e3", "24h24h", "steps5", "1.5.h", "24µs"}) {
    expect_error(
        ExitCode::kUsage, {"x"}, [&] { (void)parse_quantity(text, "x"); }, text);
  }
  for (const char* text : {"24h", "5000steps", "3e+09tokens", "0.1s", "7rows"}) {
    const Quantity quantity = parse_quantity(text, "x");
    EXPECT_EQ(parse_quantity(quantity.text(), "x"), quantity);
  }
}

TEST(NearestName, FindsTheSmallestDistance) {
  EXPECT_EQ(nearest_name("kosine", {"linear", "cosine", "constant"}), "cosine");
  EXPECT_EQ(nearest_name("x", {}), "");
  EXPECT_EQ(nearest_name(std::string(100'000, 'x'), {"a", "xxxx"}).size(), 4U);
}

TEST(Overrides, SetEveryKind) {
  Fixture f;
  for (const char* text : {"train.lr=2e-3", "train.schedule=cosine", "train.budget=500steps", "model.layers=1_2",
                           "data.shuffle=true", "run.output=a=b c", "run.stop_after=3steps"}) {
    f.table.apply_override(text);
  }
  EXPECT_EQ(f.s.lr, 2e-3);
  EXPECT_EQ(f.s.schedule, "cosine");
  EXPECT_EQ(f.s.budget, (Quantity{500, "steps"}));
  EXPECT_EQ(f.s.layers, 12);
  EXPECT_TRUE(f.s.shuffle);
  EXPECT_EQ(f.s.output, "a=b c");
  EXPECT_EQ(f.table.at("train.lr").origin(), "command line");
  EXPECT_TRUE(f.table.at("train.lr").is_set());
  EXPECT_EQ(f.table.at("train.lr").default_text(), "0.001");
  EXPECT_TRUE(f.table.at("run.output").is_free_on_resume());
  EXPECT_FALSE(f.table.at("train.lr").is_free_on_resume());
  EXPECT_EQ(f.table.values().at("model.layers"), "12");
  f.table.apply_override("run.output=");
  EXPECT_EQ(f.s.output, "");
  EXPECT_EQ(f.table.find("nothing"), nullptr);
  EXPECT_THROW((void)f.table.at("nothing"), std::logic_error);
}

struct Case {
  std::string text;
  std::string word;  ///< in the message: the key, the line or the nearest name
  std::string word2 = "";
};

TEST(Overrides, MalformedOnesNameKeyAndNearest) {
  const std::vector<Case> cases = {
      {"", "section.key=value"},
      {"train.lr", "train.lr", "section.key=value"},
      {"run.output=a\xff", "run.output", "UTF-8"},
      {"run.output=\xed\xa0\x80", "run.output", "UTF-8"},
      {"run.output=\xc0\xaf", "run.output", "UTF-8"},
      {"run.output=caf\xc3", "run.output", "UTF-8"},
      {"=1", "section.key=value"},
      {"train.lr=", "train.lr"},
      {"train.lr=1,5", "train.lr", "1,5"},
      {"train.lr=1e-3x", "train.lr", "1e-3x"},
      {"train.lr=1e400", "train.lr", "1e400"},
      {"train.lr=nan", "train.lr", "nan"},
      {"train.lr=inf", "train.lr"},
      {"train.lr=-1", "train.lr", "out of range, expected 0 to 10"},
      {"train.lr=11", "train.lr", "0 to 10"},
      {"train.lr==1", "train.lr"},
      {"train.lr =1", "train.lr"},
      {" train.lr=1", "train.lr"},
      {"train.lr=true", "train.lr"},
      {"model.layers=2.5", "model.layers", "whole number"},
      {"model.layers=0", "model.layers", "1 to 1000"},
      {"model.layers=99999999999999999999", "model.layers"},
      {"model.layers=two", "model.layers"},
      {"data.shuffle=yes", "data.shuffle", "true or false"},
      {"data.shuffle=1", "data.shuffle"},
      {"data.shuffle=True", "data.shuffle"},
      {"train.schedule=kosine", "train.schedule", "did you mean cosine"},
      {"train.schedule=", "train.schedule", "triangle2, cosine, constant"},
      {"train.budget=24", "train.budget", "a number and a unit"},
      {"train.budget=24hours", "train.budget"},
      {"train.budget=-1h", "train.budget"},
      {"train.budget=5rows", "train.budget", "steps, tokens, time"},
      {"run.stop_after=5m", "run.stop_after", "steps"},
      {"train.learning_rate=1", "unknown option", "train.lr"},
      {"learning_rate=1", "unknown option", "train.lr"},
      {"train.max_steps=5", "unknown option", "train.budget"},
      {"model.num_layers=5", "unknown option", "model.layers"},
      {"depth=5", "unknown option", "model.layers"},
      {"lr=5", "unknown option", "train.lr"},
      {"train.lrr=5", "unknown option", "train.lr"},
      {"modle.layers=5", "unknown option", "model.layers"},
      {"Train.LR=5", "unknown option"},
      {"train.lr.x=5", "unknown option", "train.lr"},
      {std::string("train.lr=1\0", 11), "train.lr"},
      {std::string("run.output=a\0b", 14), "run.output", "NUL"},
      {std::string("train.\0lr=1", 11), "unknown option"},
      {"\xff\xfe=1", "unknown option"},
      {std::string(4000, 'k') + "=1", "unknown option", "4000 characters"},
      {"train.lr=" + std::string(4000, '9'), "train.lr"},
      {"run.output=" + std::string(120'000, 'x'), "120011 characters"},
      {std::string(120'000, 'x'), "120000 characters"},
      {"train.budget=" + std::string(4000, 'h'), "train.budget"},
  };
  for (const Case& c : cases) {
    Fixture f;
    const std::string before = f.table.dump_toml();
    expect_error(
        ExitCode::kUsage, {"command line", c.word, c.word2}, [&] { f.table.apply_override(c.text); },
        c.text.substr(0, 60));
    EXPECT_EQ(f.table.dump_toml(), before) << "a refused value changed something: " << c.text.substr(0, 60);
  }
}

TEST(Overrides, MessagesShowNoControlCharactersAndStayShort) {
  Fixture f;
  try {
    f.table.apply_override("train.lr=\x1b[31m\n" + std::string(3000, 'x'));
    FAIL();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.find('\x1b'), std::string::npos);
    EXPECT_EQ(what.find('\n'), std::string::npos);
    EXPECT_LT(what.size(), 300U);
  }
}

TEST(TomlFiles, SetEveryKind) {
  Fixture f;
  f.load(
      "# comment\n[train]\nlr = 2e-3\nschedule = \"cosine\"\nbudget = \"3e9tokens\"\n"
      "[model]\nlayers = 0x10\n[data]\nshuffle = true\n[run]\noutput = \"a \\\"b\\\"\"\n");
  EXPECT_EQ(f.s.lr, 2e-3);
  EXPECT_EQ(f.s.schedule, "cosine");
  EXPECT_EQ(f.s.budget, (Quantity{3e9, "tokens"}));
  EXPECT_EQ(f.s.layers, 16);
  EXPECT_TRUE(f.s.shuffle);
  EXPECT_EQ(f.s.output, "a \"b\"");
  EXPECT_NE(f.table.at("train.lr").origin().find("c.toml:3:"), std::string::npos) << f.table.at("train.lr").origin();
}

TEST(TomlFiles, WhatEditorsAddIsHarmless) {
  for (const char* content : {"\xef\xbb\xbf[train]\nlr = 2\n", "[train]\r\nlr = 2\r\n", "[train]\nlr = 2",
                              "train.lr = 2\n", "train = { lr = 2 }\n", "\n\n[train]\n\tlr\t=\t2 # \xc3\xa9\n",
                              "\"train\".'lr' = 2\n", "[train]\nlr = 2.0\n"}) {
    Fixture f;
    f.load(content);
    EXPECT_EQ(f.s.lr, 2) << content;
  }
  for (const char* content : {"", "\n", "# only a comment", "[train]\n"}) {
    Fixture f;
    EXPECT_NO_THROW(f.load(content));
  }
}

std::string repeated(const std::string& part, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += part;
  return all;
}

TEST(TomlFiles, MalformedOnesNameFileLineAndKey) {
  const std::vector<Case> cases = {
      // Not TOML.
      {"[train\nlr = 1\n", "c.toml:1:"},
      {"[train]\nlr 1\n", "c.toml:2:"},
      {"[trian]\n", "c.toml:1:", "train"},
      {"[train]\n[modle]\n", "c.toml:2:", "model"},
      {"[train.deeper]\n", "c.toml:1:", "train.deeper"},
      {"[train]\nlr =\n", "c.toml:2:"},
      {"[train]\nlr = 1e-3x\n", "c.toml:2:"},
      {"[train]\nlr = 1,5\n", "c.toml:2:"},
      {"[train]\nlr = 1 2\n", "c.toml:2:"},
      {"[train]\nlr = yes\n", "c.toml:2:"},
      {"[train]\nlr = \"1\n", "c.toml:2:"},
      {"[train]\nlr = 'a\n", "c.toml:2:"},
      {"[train]\nschedule = cosine\n", "c.toml:2:"},
      {"[train]\nlr = 0b12\n", "c.toml:2:"},
      {"[train]\nlr = 01\n", "c.toml:2:"},
      {"[train]\nlr = 1_\n", "c.toml:2:"},
      {"[train]\nlr = 1\nlr = 2\n", "c.toml:3:"},
      {"[train]\nlr = 1\n[train]\nschedule = \"cosine\"\n", "c.toml:3:"},
      {"train.lr = 1\n[train]\nlr = 2\n", "c.toml:"},
      {"train = 1\ntrain.lr = 2\n", "c.toml:2:"},
      {"\"train.lr\" = 1\n[train]\nlr = 2\n", "train.lr", "twice"},
      {"\xef\xbb\xbf\xef\xbb\xbf[train]\n", "c.toml:1:"},
      {"[train]\nlr = 1 # \xff\xfe\n", "c.toml:2:"},
      {"[train]\n\xc3\x28 = 1\n", "c.toml:", "utf-8"},
      {std::string("[train]\nlr = 1\0\n", 16), "c.toml:2:"},
      {std::string("\0", 1), "c.toml:1:"},
      {"\xff\xfe[\0t\0", "c.toml:1:"},
      {"[train]\rlr = 2\r", "c.toml:1:"},
      {"[train]\nlr = 2\x01\n", "c.toml:2:"},
      {"]\n", "c.toml:1:"},
      {"= 1\n", "c.toml:1:"},
      {"[train]\n. = 1\n", "c.toml:2:"},
      {"[]\n", "c.toml:1:"},
      {"[train]\nschedule = \"\\q\"\n", "c.toml:2:"},
      {"[train]\nschedule = \"\\ud800\"\n", "c.toml:2:"},
      {"[train]\nlr = 99999999999999999999\n", "c.toml:2:"},
      // TOML, but not ours.
      {"[train]\nlr = 1e400\n", "c.toml:2:"},
      {"[train]\nlr = nan\n", "c.toml:2:", "train.lr"},
      {"[train]\nlr = -inf\n", "c.toml:2:", "train.lr"},
      {"[train]\nlr = -1\n", "c.toml:2:", "train.lr"},
      {"[train]\nlr = \"1\"\n", "c.toml:2:", "without quotes"},
      {"[train]\nlr = true\n", "c.toml:2:", "train.lr"},
      {"[train]\nlr = [1, 2]\n", "c.toml:2:", "train.lr is an array"},
      {"[train]\nlr = 1979-05-27\n", "c.toml:2:", "date"},
      {"[train]\nlr = 07:32:00\n", "c.toml:2:", "date"},
      {"[[train]]\nlr = 1\n", "c.toml:1:", "train is an array"},
      {"[train.lr]\nx = 1\n", "c.toml:2:", "train.lr"},
      {"train = 5\n", "c.toml:1:", "unknown option"},
      {"[train]\nbudget = 24\n", "c.toml:2:", "in quotes"},
      {"[train]\nbudget = \"24\"\n", "c.toml:2:", "a number and a unit"},
      {"[train]\nschedule = \"kosine\"\n", "c.toml:2:", "did you mean cosine"},
      {"[train]\nlearning_rate = 1\n", "c.toml:2:", "train.lr"},
      {"[trian]\nlr = 1\n", "c.toml:2:", "train.lr"},
      {"lr = 1\n", "c.toml:1:", "train.lr"},
      {"[model]\nlayers = 2.5\n", "c.toml:2:", "whole number"},
      {"[model]\nlayers = 0\n", "c.toml:2:", "1 to 1000"},
      {"[data]\nshuffle = \"true\"\n", "c.toml:2:", "without quotes"},
      {"[data]\nshuffle = 1\n", "c.toml:2:", "true or false"},
      {"[run]\noutput = \"a\\u0000b\"\n", "c.toml:2:", "NUL"},
      // Hostile sizes.
      {"[train]\n\n# " + std::string(5000, 'x') + "\n", "c.toml:3:", "5002 characters"},
      {repeated("a.", 50'000) + "a = 1\n", "c.toml:1:", "at most 4096"},
      {repeated("a.", 1500) + "a = 1\n", "c.toml:1:", "unknown option"},
      {repeated("[", 3000) + "\n", "c.toml:1:"},
      {"x = " + repeated("[", 3000) + "\n", "c.toml:1:"},
      {repeated("x = [\n", 1) + repeated("[\n", 100'000), "c.toml:"},
      {"x = " + repeated("{a=", 1000) + "\n", "c.toml:1:"},
      {repeated("# a comment line\n", 70'000), "c.toml has 1190000 bytes"},
      {"[train]\nschedule = \"\"\"" + repeated("x\n", 400'000), "c.toml:"},
  };
  ASSERT_GE(cases.size(), 60U);
  for (const Case& c : cases) {
    Fixture f;
    expect_error(
        ExitCode::kUsage, {c.word, c.word2}, [&] { f.load(c.text); }, c.text.substr(0, 60));
  }
}

TEST(TomlFiles, KnownSectionsMayBeEmpty) {
  Fixture f;
  f.load("[train]\n# lr = 1\n[model]\nlayers = 3\n");
  EXPECT_EQ(f.s.layers, 3);
}

TEST(TomlFiles, TheFirstErrorOfTheFileIsReported) {
  Fixture f;
  expect_error(ExitCode::kUsage, {"c.toml:2:", "zebra"}, [&] { f.load("[train]\nzebra = 1\naardvark = 2\n"); });
}

TEST(TomlFiles, MissingFileAndFolder) {
  const TemporaryFolder folder;
  Fixture f;
  expect_error(ExitCode::kUsage, {"missing.toml", "No such file"},
               [&] { f.table.load_toml_file(folder / "missing.toml"); });
  expect_error(ExitCode::kUsage, {"is a folder"}, [&] { f.table.load_toml_file(folder.path().string()); });
}

TEST(DumpToml, ReadsBackToTheSameValues) {
  for (const bool with_help : {false, true}) {
    Fixture f;
    f.s.lr = 1.0 / 3;
    f.s.output = "a \"quoted\" \\ path\twith\nall of it \xc3\xa9";
    f.s.budget = {2.5e9, "tokens"};
    f.s.shuffle = true;
    Fixture g;
    g.load(f.table.dump_toml(with_help));
    EXPECT_EQ(g.table.values(), f.table.values());
    EXPECT_EQ(g.s.lr, f.s.lr);
    EXPECT_EQ(g.s.output, f.s.output);
  }
  for (const double lr : {0.0, 1.0, 5e-324, 1e-7, 2.0}) {
    Fixture f;
    f.s.lr = lr;
    Fixture g;
    g.load(f.table.dump_toml());
    EXPECT_EQ(g.s.lr, lr) << f.table.dump_toml();
  }
}

TEST(Words, NameOneValueOfAnIntegerOutsideItsRange) {
  std::int64_t rows = 8;
  OptionTable table;
  table.add("train.rows", &rows, "rows").range(1, 100).word("auto", 0);
  table.apply_override("train.rows=auto");
  EXPECT_EQ(rows, 0);
  EXPECT_EQ(table.values().at("train.rows"), "auto");
  EXPECT_NE(table.dump_toml().find("rows = \"auto\""), std::string::npos) << table.dump_toml();
  EXPECT_NE(table.help_text().find("integer|auto"), std::string::npos);
  rows = 16;  // resolved by the program
  EXPECT_EQ(table.values().at("train.rows"), "16");
  expect_error(ExitCode::kUsage, {"out of range"}, [&] { table.apply_override("train.rows=0"); });
  expect_error(ExitCode::kUsage, {"auto"}, [&] { table.apply_override("train.rows=atuo"); });

  const TemporaryFolder folder;
  std::ofstream(folder / "a.toml") << "[train]\nrows = \"auto\"\n";
  table.load_toml_file(folder / "a.toml");
  EXPECT_EQ(rows, 0);
  std::ofstream(folder / "b.toml") << "[train]\nrows = \"64\"\n";
  expect_error(ExitCode::kUsage, {"without quotes"}, [&] { table.load_toml_file(folder / "b.toml"); });
}

TEST(HelpText, HasEveryKeyDefaultAndKind) {
  Fixture f;
  const std::string help = f.table.help_text();
  for (const Option& row : f.table.rows()) {
    EXPECT_NE(help.find(row.key() + "=" + row.default_text()), std::string::npos) << row.key();
    EXPECT_NE(help.find(row.help()), std::string::npos);
    EXPECT_NE(help.find("[" + row.kind() + "]"), std::string::npos);
  }
}

}  // namespace
}  // namespace cram
