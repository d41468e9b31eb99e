//! Values of any type that can be deserialized, one for each variant that is in it.
//!
//! No list of messages is kept by hand, so none can be forgotten. Numbers and texts follow from the names of the fields:
//! two fields that change places, and one that gets another meaning with another name, show in the bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};

/// How many elements a sequence has.
const ELEMENTS: usize = 2;

/// A value, and what it is called.
pub struct Sample<T> {
    /// The variants in it that are not the first of their enumerations: `Claim/contexts.qps.remote=None`.
    pub name: String,
    /// The value.
    pub value: T,
}

/// Why a type cannot be sampled.
#[derive(Debug)]
pub struct Unsupported(String);

impl fmt::Display for Unsupported {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}

impl de::Error for Unsupported {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

/// Which variant is taken where, by the place in the value.
type Choices = BTreeMap<String, usize>;

/// One value for each variant of the type, and of every enumeration within it.
pub fn samples<T: DeserializeOwned>() -> Result<Vec<Sample<T>>, Unsupported> {
    let mut samples = Vec::new();
    let mut known = BTreeSet::new();
    let mut left = VecDeque::from([Choices::new()]);
    while let Some(choices) = left.pop_front() {
        let mut met = BTreeMap::new();
        let mut sampler = Sampler {
            choices: &choices,
            met: &mut met,
        };
        let value = T::deserialize(Place {
            sampler: &mut sampler,
            path: String::new(),
            element: 0,
        })?;
        for (path, variants) in &met {
            // One that was in an earlier value has had its turn.
            if known.insert(path.clone()) {
                let others = (1..variants.len()).map(|variant| {
                    let mut choices = choices.clone();
                    choices.insert(path.clone(), variant);
                    choices
                });
                left.extend(others);
            }
        }
        samples.push(Sample {
            name: name(&choices, &met),
            value,
        });
    }
    Ok(samples)
}

fn name(choices: &Choices, met: &BTreeMap<String, Vec<&'static str>>) -> String {
    let variant = |path: &str| {
        met.get(path)
            .map(|variants| variants[choices.get(path).copied().unwrap_or(0)])
    };
    let mut name = variant("").unwrap_or_default().to_owned();
    for path in choices.keys().filter(|path| !path.is_empty()) {
        // A place that is not in the value has no name.
        if let Some(variant) = variant(path) {
            name.push_str(&format!("/{path}={variant}"));
        }
    }
    name
}

struct Sampler<'a> {
    choices: &'a Choices,
    met: &'a mut BTreeMap<String, Vec<&'static str>>,
}

impl Sampler<'_> {
    fn choose(&mut self, path: &str, variants: &[&'static str]) -> usize {
        self.met.insert(path.to_owned(), variants.to_vec());
        self.choices.get(path).copied().unwrap_or(0)
    }
}

/// A place in a value.
struct Place<'s, 'c> {
    sampler: &'s mut Sampler<'c>,
    /// The names of the fields that lead here.
    path: String,
    /// Of the elements of a sequence, which.
    element: usize,
}

impl<'c> Place<'_, 'c> {
    fn below(&mut self, name: &str, element: usize) -> Place<'_, 'c> {
        let path = match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name.to_owned(),
            (_, true) => self.path.clone(),
            _ => format!("{}.{name}", self.path),
        };
        Place {
            sampler: self.sampler,
            path,
            element: self.element * ELEMENTS + element,
        }
    }

    /// A number that follows from the place (FNV-1a), and is not 0.
    fn number(&self) -> u64 {
        let bytes = self.path.bytes().chain(self.element.to_le_bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        hash | 1
    }

    fn text(&self) -> String {
        let last = self.path.rsplit('.').next().unwrap_or_default();
        format!("{last}-{}", self.element)
    }

    fn seq<'p>(self, names: &'p [&'p str], count: usize, is_tuple: bool) -> Seq<'p, Self> {
        Seq {
            place: self,
            names,
            next: 0,
            count,
            is_tuple,
        }
    }
}

macro_rules! numbers {
    ($($deserialize:ident $visit:ident $type:ty;)*) => {
        $(fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
            visitor.$visit(self.number() as $type)
        })*
    };
}

impl<'de> de::Deserializer<'de> for Place<'_, '_> {
    type Error = Unsupported;

    fn is_human_readable(&self) -> bool {
        false
    }

    numbers! {
        deserialize_u8 visit_u8 u8; deserialize_u16 visit_u16 u16; deserialize_u32 visit_u32 u32;
        deserialize_u64 visit_u64 u64; deserialize_u128 visit_u128 u128;
        deserialize_i8 visit_i8 i8; deserialize_i16 visit_i16 i16; deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_f32((self.number() % 10_000) as f32 / 8.0)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_f64((self.number() % 10_000) as f64 / 8.0)
    }

    /// Both are recorded: of two that change places one shows it.
    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        let chosen = self.sampler.choose(&self.path, &["true", "false"]);
        visitor.visit_bool(chosen == 0)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_string(self.text())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_string(self.text())
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_byte_buf(self.text().into_bytes())
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_byte_buf(self.text().into_bytes())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        match self.sampler.choose(&self.path, &["Some", "None"]) {
            0 => {
                let mut place = self;
                visitor.visit_some(place.below("some", 0))
            }
            _ => visitor.visit_none(),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(&[], ELEMENTS, false))
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, count: usize, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(&[], count, true))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        count: usize,
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(&[], count, true))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_map(Entry {
            place: self,
            given: false,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(fields, fields.len(), false))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        let mut place = self;
        let chosen = place.sampler.choose(&place.path, variants);
        visitor.visit_enum(Variant {
            place: place.below(variants[chosen], 0),
            index: chosen as u32,
        })
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_char('v')
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Unsupported> {
        Err(Unsupported("names are no part of these messages".to_owned()))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Unsupported> {
        Err(Unsupported(
            "a type that takes anything has no samples".to_owned(),
        ))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_unit()
    }
}

/// Elements of a sequence, of a tuple, or fields of a structure.
struct Seq<'p, P> {
    place: P,
    /// The fields' names; empty where there are none.
    names: &'p [&'p str],
    next: usize,
    count: usize,
    is_tuple: bool,
}

impl<'de, 's, 'c> de::SeqAccess<'de> for Seq<'_, Place<'s, 'c>> {
    type Error = Unsupported;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Unsupported> {
        if self.next == self.count {
            return Ok(None);
        }
        let index = self.next;
        self.next += 1;
        let number;
        let (name, element) = match (self.names.get(index), self.is_tuple) {
            (Some(name), _) => (*name, 0),
            (None, true) => {
                number = index.to_string();
                (number.as_str(), 0)
            }
            (None, false) => ("", index),
        };
        seed.deserialize(self.place.below(name, element)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.count - self.next)
    }
}

/// The one entry of a map: the order of more is not the type's to say.
struct Entry<P> {
    place: P,
    given: bool,
}

impl<'de> de::MapAccess<'de> for Entry<Place<'_, '_>> {
    type Error = Unsupported;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Unsupported> {
        match std::mem::replace(&mut self.given, true) {
            true => Ok(None),
            false => seed.deserialize(self.place.below("key", 0)).map(Some),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Unsupported> {
        seed.deserialize(self.place.below("value", 0))
    }
}

struct Variant<P> {
    place: P,
    index: u32,
}

impl<'de, 's, 'c> de::EnumAccess<'de> for Variant<Place<'s, 'c>> {
    type Error = Unsupported;
    type Variant = Place<'s, 'c>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Place<'s, 'c>), Unsupported> {
        let index = seed.deserialize(IntoDeserializer::<Unsupported>::into_deserializer(self.index))?;
        Ok((index, self.place))
    }
}

impl<'de> de::VariantAccess<'de> for Place<'_, '_> {
    type Error = Unsupported;

    fn unit_variant(self) -> Result<(), Unsupported> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Unsupported> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, count: usize, visitor: V) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(&[], count, true))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unsupported> {
        visitor.visit_seq(self.seq(fields, fields.len(), false))
    }
}
